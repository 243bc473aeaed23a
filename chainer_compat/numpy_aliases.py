"""Names that NumPy removed since Chainer 7.8.1, such as ``np.float`` and ``np.product``.

Older programs use them; :func:`chainer_compat.restore_numpy_aliases` restores them.
"""

from __future__ import annotations

import builtins
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from chainer_compat import ALIASES_VARIABLE, _patch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, DTypeLike, NDArray

# Aliases of Python's own types.  NumPy 2 has scalar types named bool and long, which remain.
BUILTINS = {'bool': 'bool', 'complex': 'complex', 'float': 'float', 'int': 'int', 'long': 'int',
            'object': 'object', 'str': 'str', 'unicode': 'str'}

# Aliases of functions, types and constants that NumPy still has.
RENAMED = {
    'alltrue': 'all', 'cumproduct': 'cumprod', 'mat': 'asmatrix', 'product': 'prod',
    'rank': 'ndim', 'round_': 'round', 'row_stack': 'vstack', 'sometrue': 'any',
    'trapz': 'trapezoid', 'typeDict': 'sctypeDict',
    'bool8': 'bool_', 'bytes0': 'bytes_', 'cfloat': 'complex128', 'clongfloat': 'clongdouble',
    'complex_': 'complex128', 'float_': 'float64', 'int0': 'intp', 'longcomplex': 'clongdouble',
    'longfloat': 'longdouble', 'object0': 'object_', 'singlecomplex': 'complex64',
    'str0': 'str_', 'string_': 'bytes_', 'uint0': 'uintp', 'unicode_': 'str_', 'void0': 'void',
    'Inf': 'inf', 'Infinity': 'inf', 'NaN': 'nan', 'PINF': 'inf', 'infty': 'inf',
}


def alen(a: ArrayLike) -> int:
    """Return the length of the first axis."""
    import numpy as np

    return len(np.array(a, ndmin=1))


def asfarray(a: ArrayLike, dtype: DTypeLike = float) -> NDArray[Any]:
    """Return an array of floating-point numbers."""
    import numpy as np

    return np.asarray(a, dtype if np.issubdtype(dtype, np.inexact) else float)


def asscalar(a: NDArray[Any]) -> Any:
    """Return the only element as a Python number."""
    return a.item()


def in1d(ar1: ArrayLike, ar2: ArrayLike, assume_unique: bool = False, invert: bool = False,
         **options: Any) -> NDArray[np.bool_]:
    """Return for each element of ``ar1``, in one dimension, whether ``ar2`` contains it."""
    import numpy as np

    return np.isin(np.ravel(ar1), ar2, assume_unique, invert, **options)


def msort(a: ArrayLike) -> NDArray[Any]:
    """Return an array sorted along the first axis."""
    import numpy as np

    return np.sort(a, axis=0)


FUNCTIONS = [alen, asfarray, asscalar, in1d, msort]
CONSTANTS = {'NINF': -float('inf'), 'NZERO': -0., 'PZERO': 0.}
NAMES = {*BUILTINS, *RENAMED, *CONSTANTS, *(function.__name__ for function in FUNCTIONS)}


def restore(numpy: ModuleType) -> None:
    """Define the names, also in place of deprecated ones, which warn when they are used."""
    found = vars(numpy)
    for old, new in BUILTINS.items():
        found.setdefault(old, getattr(builtins, new))
    for old, new in RENAMED.items():
        if new in found:  # NumPy 1 has trapz and no trapezoid
            found[old] = found[new]
    found.update(CONSTANTS)
    found.update((function.__name__, function) for function in FUNCTIONS)


def find_spec(asking: Any, name: str, path: Any, target: Any) -> ModuleSpec | None:
    """Return NumPy's spec; its loader restores the names after executing the module."""
    spec = _patch.find_original_spec(asking, name, path, target)
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            restore(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def extend_error(numpy: ModuleType) -> None:
    """Mention the option in the AttributeError for a name that it restores."""
    find = vars(numpy)['__getattr__']

    def find_or_explain(name: str) -> Any:
        try:
            return find(name)
        except AttributeError as error:
            if name not in NAMES:
                raise
            # name=None: otherwise, Python appends a similar name to the last line.
            raise AttributeError(
                f'{error}\n{ALIASES_VARIABLE}=1 restores the names that NumPy removed; set this '
                'environment variable to run old programs unchanged.', name=None) from None

    vars(numpy)['__getattr__'] = find_or_explain
