"""Environment variables of this package, and the values of those that are flags."""

import os
from collections.abc import Iterable

#: All variables of this package whose names start with ``CHAINER_``.
KNOWN = frozenset({
    'CHAINER_COMPAT', 'CHAINER_COMPAT_DIALECT', 'CHAINER_COMPAT_NAMES',
    'CHAINER_COMPAT_NUMPY_ALIASES', 'CHAINER_FUSED_UPDATES', 'CHAINER_TORCH_COMPUTE_DTYPE',
    'CHAINER_USE_TORCH'})

#: The meaning of each value, in lower case.
FLAGS = {'1': True, 'true': True, 'yes': True, 'on': True,
         '0': False, 'false': False, 'no': False, 'off': False}


def flag(name: str, default: bool) -> bool:
    """Return a variable as a bool, or ``default`` if it is unset or empty.

    Raises:
        ValueError: If the value is neither in :data:`FLAGS`, ignoring case, nor a number.
    """
    value = os.environ.get(name, '').strip().lower()
    if value in FLAGS:
        return FLAGS[value]
    if value.isdecimal():
        return int(value) != 0
    if value:
        raise ValueError(f'{name} is {os.environ[name]!r}. Use 1, true, yes or on; 0, false, no or '
                         'off; or unset it.')
    return default


def check(names: Iterable[str]) -> None:
    """Raise ValueError if one of these variables is neither true nor false."""
    for name in names:
        flag(name, False)
