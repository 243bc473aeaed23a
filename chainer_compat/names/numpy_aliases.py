"""Names that NumPy has removed since Chainer 7.8.1, such as ``np.float`` and ``np.product``.

Existing programs use them; :func:`chainer_compat.restore_names` restores them.
"""

from __future__ import annotations

import builtins
import importlib
import os
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from chainer_compat.patching import loader, variables

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, DTypeLike, NDArray

# Aliases of Python's own types. NumPy 2 has scalar types named bool and long, which remain.
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
    'Inf': 'inf', 'Infinity': 'inf', 'NAN': 'nan', 'NaN': 'nan', 'PINF': 'inf', 'infty': 'inf',
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
    """Return a one-dimensional mask of the elements of ``ar1`` that ``ar2`` contains."""
    import numpy as np

    return np.isin(np.ravel(ar1), ar2, assume_unique, invert, **options)


def msort(a: ArrayLike) -> NDArray[Any]:
    """Return an array sorted along the first axis."""
    import numpy as np

    return np.sort(a, axis=0)


def find_common_type(array_types: list[DTypeLike], scalar_types: list[DTypeLike]
                     ) -> np.dtype[Any] | None:
    """Return the common dtype; scalar types count only if their kind is higher."""
    arrays, scalars = _smallest(array_types), _smallest(scalar_types)
    if arrays is None or scalars is None:
        return scalars if arrays is None else arrays
    if arrays.kind not in _KINDS or scalars.kind not in _KINDS:
        return None
    if _KINDS.index(scalars.kind) <= _KINDS.index(arrays.kind):
        return arrays
    if scalars > arrays:
        return scalars
    if scalars.char not in _BY_SIZE:
        return None
    return _smallest([scalars, arrays], _BY_SIZE.index(scalars.char))


#: Characters and kinds of dtypes, in the order in which they are tried.
_BY_SIZE, _KINDS = '?bBhHiIlLqQefdgFDGO', 'buifcSUVOMm'


def _smallest(types: list[DTypeLike], start: int = 0) -> np.dtype[Any] | None:
    """Return the first dtype to which all ``types`` can be cast; a single type is unchanged."""
    import numpy as np

    found = [np.dtype(each) for each in types]
    if len(found) <= 1:
        return found[0] if found else None
    tried = (np.dtype(each) for each in _BY_SIZE[start:])
    return next((each for each in tried if all(each >= dtype for dtype in found)), None)


def issubsctype(arg1: Any, arg2: Any) -> bool:
    """Return whether the scalar type of ``arg1`` is a subclass of the scalar type of ``arg2``."""
    return issubclass(obj2sctype(arg1), obj2sctype(arg2))


def issctype(rep: Any) -> bool:
    """Return whether an object is a scalar type or a dtype."""
    import numpy as np

    return isinstance(rep, (type, np.dtype)) and obj2sctype(rep) not in (None, np.object_)


def issubclass_(arg1: Any, arg2: Any) -> bool:
    """Return whether ``arg1`` is a subclass of ``arg2``; false if it is not a class."""
    try:
        return issubclass(arg1, arg2)
    except TypeError:
        return False


def obj2sctype(rep: Any, default: Any = None) -> Any:
    """Return the scalar type of a dtype, type or array."""
    import numpy as np

    if isinstance(rep, type) and issubclass(rep, np.generic):
        return rep
    if isinstance(rep, np.ndarray):
        return rep.dtype.type
    try:
        return np.dtype(rep).type
    except Exception:  # like NumPy's original function
        return default


def sctype2char(sctype: Any) -> str:
    """Return the type character of a scalar type."""
    import numpy as np

    return np.dtype(obj2sctype(sctype)).char


class Cast(dict[Any, Any]):
    """Conversion functions by dtype: ``np.cast[dtype](x)``."""

    def __missing__(self, dtype: Any) -> Any:
        import numpy as np

        return lambda x: np.asarray(x).astype(dtype)


FUNCTIONS = [alen, asfarray, asscalar, find_common_type, in1d, issctype, issubclass_, issubsctype,
             msort, obj2sctype, sctype2char]
CONSTANTS = {'NINF': -float('inf'), 'NZERO': -0., 'PZERO': 0.}
# Names that moved to another NumPy module.
MOVED = {
    'AxisError': 'exceptions', 'ComplexWarning': 'exceptions', 'TooHardError': 'exceptions',
    'VisibleDeprecationWarning': 'exceptions', 'RankWarning': 'exceptions',
    'DataSource': 'lib.npyio', 'byte_bounds': 'lib.array_utils', 'chararray': 'char',
    'compare_chararrays': 'char', 'format_parser': 'rec',
}
NAMES = {*BUILTINS, *RENAMED, *MOVED, *CONSTANTS, 'cast', 'sctypes',
         *(function.__name__ for function in FUNCTIONS)}


def restore(numpy: ModuleType) -> None:
    """Restore the names that the environment variables request."""
    wanted = os.environ.get('CHAINER_COMPAT_NAMES', '')
    if wanted not in ('', '0', 'all'):
        raise ValueError(f"CHAINER_COMPAT_NAMES must be 'all', '0' or unset, not {wanted!r}.")
    if wanted == 'all' or variables.flag('CHAINER_COMPAT_NUMPY_ALIASES', False):
        _define_names(numpy)
    if wanted == 'all':
        from chainer_compat.names import numpy_behavior

        numpy_behavior.restore(numpy)


def _define_names(numpy: ModuleType) -> None:
    """Define the names. Replace deprecated ones, which would warn when they are used."""
    found = vars(numpy)
    for old, new in BUILTINS.items():
        found.setdefault(old, getattr(builtins, new))
    for old, new in RENAMED.items():
        if new in found:  # NumPy 1 has trapz but no trapezoid
            found[old] = found[new]
    found.update(CONSTANTS)
    found.update((function.__name__, function) for function in FUNCTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)  # chararray warns since NumPy 2.5
        for name, module in MOVED.items():
            if name not in found:
                found[name] = getattr(importlib.import_module(f'numpy.{module}'), name)
    found['cast'] = Cast()
    if 'sctypes' not in found:
        found['sctypes'] = _sctypes(numpy)


def _sctypes(numpy: ModuleType) -> dict[str, list[type]]:
    """Return the scalar types by kind."""
    found: dict[str, list[type]] = {name: [] for name in ('int', 'uint', 'float', 'complex')}
    for code in 'bhilqBHILQefdgFDG':
        scalar = numpy.dtype(code).type
        kind = {'i': 'int', 'u': 'uint', 'f': 'float', 'c': 'complex'}[numpy.dtype(code).kind]
        if all(numpy.dtype(scalar) != numpy.dtype(other) for other in found[kind]):
            found[kind].append(scalar)
    return {**found, 'others': [bool, object, bytes, str, numpy.void]}


def find_spec(caller: Any, name: str, path: Any, target: Any) -> ModuleSpec | None:
    """Return NumPy's spec; its loader restores the names after executing the module."""
    spec = loader.find_original_spec(caller, name, path, target)
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            restore(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def extend_error(numpy: ModuleType) -> None:
    """Make NumPy's AttributeError mention the option, for names that it restores."""
    find = vars(numpy)['__getattr__']

    def find_or_explain(name: str) -> Any:
        try:
            return find(name)
        except AttributeError as error:
            if name not in NAMES:
                raise
            # name=None: otherwise, Python appends a similar name to the last line.
            raise AttributeError(
                f'{error}\nCHAINER_COMPAT_NAMES=all restores names that NumPy and Python removed; '
                'set this environment variable to run old code unchanged.', name=None) from None

    vars(numpy)['__getattr__'] = find_or_explain
