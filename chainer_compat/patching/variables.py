"""Environment variables of this package, and checks of the values of variables."""

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

#: Chainer's variables that must be integers, and the values of ``CHAINER_DTYPE``.
_INTEGERS = ('CHAINER_CUDNN_FAST_BATCH_NORMALIZATION', 'CHAINER_DEBUG',
             'CHAINER_KEEP_GRAPH_ON_REPORT', 'CHAINER_LAZY_GRAD_SUM', 'CHAINER_TYPE_CHECK')
_DTYPE, _DTYPES = 'CHAINER_DTYPE', ('float16', 'float32', 'float64', 'mixed16')


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


def check_variables_of_chainer() -> None:
    """Raise ValueError if Chainer, when it is imported, does not accept the value of a variable."""
    for name in _INTEGERS:
        try:
            int(os.environ.get(name, '0'))
        except ValueError:
            raise ValueError(f'{name} is {os.environ[name]!r}. Use 1 or 0, or unset it.') from None
    dtype = os.environ.get(_DTYPE, 'float32')
    if dtype not in _DTYPES:
        raise ValueError(f'{_DTYPE} is {dtype!r}. Use one of {", ".join(_DTYPES)}.')
