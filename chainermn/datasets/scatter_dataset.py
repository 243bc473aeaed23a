"""The name that the module ``scatter`` had in ChainerMN 1 to 6; now the name of a function."""
from __future__ import annotations

import warnings

from chainermn.datasets import scatter


def __getattr__(name: str) -> object:
    value = getattr(scatter, name)
    if not name.startswith('_'):
        warnings.warn('the module chainermn.datasets.scatter_dataset is deprecated; import '
                      f'{name} from chainermn.datasets.scatter', DeprecationWarning, stacklevel=2)
    return value
