"""User settings that decide how Chainer computes: ``np.seterr``, ``chainer.config``."""

from __future__ import annotations

import functools
from collections.abc import Callable


class OptionError(ValueError):
    """Raised if an option of ``chainer.config`` has an invalid value."""


class OptionWarning(UserWarning):
    """Issued if an option of ``chainer.config`` makes kernels slow."""


def raises_errors() -> bool:
    """Return whether ``np.seterr`` is set to raise or call, which PyTorch does not support."""
    global _harmless
    import numpy as np  # here, so that Python's startup does not import NumPy

    setting = _reader()()
    if setting is _harmless:
        return False
    actions = np.geterr().values()
    if 'raise' in actions or 'call' in actions:
        return True
    _harmless = setting
    return False


#: The last setting of ``np.seterr`` that was found to raise no errors.
_harmless: object = object()


@functools.cache
def _reader() -> Callable[[], object]:
    """Return a function whose result identifies the setting of ``np.seterr`` in this thread."""
    try:
        from numpy._core._ufunc_config import (  # type: ignore[attr-defined]
            _extobj_contextvar,
        )
    except ImportError:  # NumPy 1: each result is a new object
        return object
    return functools.partial(_extobj_contextvar.get, None)
