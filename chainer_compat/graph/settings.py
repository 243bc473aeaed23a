"""Settings of the program that decide how Chainer computes: ``np.seterr``, ``chainer.config``."""

from __future__ import annotations

import functools
from collections.abc import Callable


class OptionError(ValueError):
    """Raised if an option of ``chainer.config`` has an invalid value."""


class OptionWarning(UserWarning):
    """Given if an option of ``chainer.config`` makes kernels slow."""


def raises_errors() -> bool:
    """Return whether ``np.seterr`` asks for an error, or a call, that PyTorch does not support."""
    global _harmless
    import numpy as np  # not when Python starts

    setting = _reader()()
    if setting is _harmless:
        return False
    actions = np.geterr().values()
    if 'raise' in actions or 'call' in actions:
        return True
    _harmless = setting
    return False


#: A setting of ``np.seterr`` that raises no errors.
_harmless: object = object()


@functools.cache
def _reader() -> Callable[[], object]:
    """Return a function whose result stands for the setting of ``np.seterr`` in this thread."""
    try:
        from numpy._core._ufunc_config import (  # type: ignore[attr-defined]
            _extobj_contextvar,
        )
    except ImportError:  # NumPy 1: each result is another one
        return object
    return functools.partial(_extobj_contextvar.get, None)
