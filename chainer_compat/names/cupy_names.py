"""Names of CuPy 1 to 12 that CuPy removed: ``CHAINER_COMPAT_NAMES=all`` restores them.

Nothing is imported or defined before a program uses a name. Names that CuPy has are not replaced.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from chainer_compat.patching import loader

VARIABLE = 'CHAINER_COMPAT_NAMES'
HINT = (f'{VARIABLE}=all restores what CuPy removed; set this environment variable to run old '
        'programs unchanged.')

#: Old modules, and where they are now. Modules below them have moved with them.
MODULES = {
    **{f'cupy.{name}': f'cupy._{name}' for name in (
        'binary', 'core', 'creation', 'indexing', 'io', 'logic', 'manipulation', 'math', 'misc',
        'padding', 'sorting', 'statistics', 'util')},
    **{f'cupy.cuda.{name}': f'cupy_backends.cuda.libs.{name}' for name in (
        'cublas', 'curand', 'cusolver', 'cusparse', 'nvrtc')},
    'cupy._core.elementwise': 'cupy._core._kernel',
    'cupy._core.reduction': 'cupy._core._reduction',
    'cupy._logic.type_test': 'cupy._logic.type_testing',
    'cupy.cuda._environment': 'cupy._environment',
    'cupy.cuda.driver': 'cupy_backends.cuda.api.driver',
    'cupy.cuda.module': 'cupy.cuda.function',
    'cupy.cusolver': 'cupyx.cusolver',
    'cupy.cusparse': 'cupyx.cusparse',
    'cupy.cutensor': 'cupyx.cutensor',
    'cupy.elementwise': 'cupy._core._kernel',
    'cupy.ext': 'cupyx',
    'cupy.flags': 'cupy._core.flags',
    'cupy.internal': 'cupy._core.internal',
    'cupy.prof': 'cupyx.profiler',
    'cupy.reduction': 'cupy._core._reduction',
    'cupy.sparse': 'cupyx.scipy.sparse',
    'cupy_backends.cuda.libs.profiler': 'cupy.cuda.profiler',
}

#: By package: its modules whose names now begin with an underscore.
UNDERSCORED = {package: modules.split() for package, modules in {
    'cupy.fft': 'config fft',
    'cupy.lib': 'polynomial',
    'cupy.prof': 'time_range',
    'cupy.linalg': 'decomposition eigenvalue einsum einsum_opt norms product solve util',
    'cupy.random': 'distributions generator permutations sample',
    'cupy.testing': 'array attr condition helper hypothesis parameterized random',
    'cupyx': 'rsqrt runtime scatter',
    'cupyx.linalg': 'solve',
    'cupyx.linalg.sparse': 'solve',
    'cupyx.profiler': 'time_range',
    'cupyx.scipy.fft': 'fft',
    'cupyx.scipy.fftpack': 'fft',
    'cupyx.scipy.linalg': 'decomp_lu solve_triangular special_matrices',
    'cupyx.scipy.ndimage': 'filters fourier interpolation measurements morphology',
    'cupyx.scipy.signal': 'bsplines signaltools',
    'cupyx.scipy.sparse':
        'base compressed construct coo csc csr data dia extract sputils util',
    'cupyx.scipy.sparse.linalg': 'solve',
    'cupyx.scipy.special':
        'bessel convex_analysis digamma erf gamma gammaln polygamma statistics zeta',
    'cupyx.scipy.stats': 'distributions stats',
}.items()}

#: Constants of CUDA that CuPy no longer shows to Python.
_RUNTIME: dict[str, str | int] = {
    'deviceAttributeComputeCapabilityMajor': 75, 'deviceAttributeComputeCapabilityMinor': 76,
    'errorInvalidValue': 1, 'errorMemoryAllocation': 2,
}

#: By module, with its name of now: old names, and the path of what they mean, or their values.
NAMES: dict[str, dict[str, str | int]] = {
    'cupy': {
        'bool': 'builtins.bool', 'complex': 'builtins.complex', 'float': 'builtins.float',
        'int': 'builtins.int', 'bool8': 'numpy.bool_', 'int0': 'numpy.intp',
        'longfloat': 'numpy.longdouble', 'uint0': 'numpy.uintp',
        'fusion': 'cupy._core.fusion', 'scatter_add': 'cupyx.scatter_add',
    },
    'cupy._core': {'_AxisError': 'numpy.exceptions.AxisError', 'conj': 'cupy.conjugate'},
    'cupy._core.core': {
        'conj': 'cupy.conjugate',
        'tensordot_core_v11': 'cupy._core._routines_linalg.tensordot_core_v11',
        **{f'COMPUTE_TYPE_{name}': f'cupy._core._routines_linalg.COMPUTE_TYPE_{name}'
           for name in ('BF16', 'DEFAULT', 'FP16', 'FP32', 'FP64', 'PEDANTIC', 'TBD', 'TF32')},
    },
    'cupy._core.fusion': {'conj': 'cupy.conjugate', 'sqrt_fixed': 'cupy.sqrt'},
    'cupy._core.internal': {'prod_ssize_t': 'cupy._core.internal.prod'},
    'cupy._math.arithmetic': {'conj': 'cupy.conjugate'},
    'cupy._misc': {'may_share_memory': 'cupy.may_share_memory',
                   'shares_memory': 'cupy.shares_memory'},
    'cupy._padding': {'pad': 'cupy._padding.pad'},
    'cupy.cuda': {
        'compile_with_cache': f'{__name__}.compile_with_cache', 'cusolver_enabled': True,
        'cutensor': 'cupy.cuda.cutensor', 'nccl': 'cupy.cuda.nccl',
        **{f'{name}_enabled': f'cupy.cuda.{name}.available'
           for name in ('cub', 'cutensor', 'nccl', 'nvtx', 'thrust')},
    },
    'cupy.cuda.compiler': {
        'TemporaryDirectory': 'tempfile.TemporaryDirectory',
        'compile_with_cache': f'{__name__}.compile_with_cache',
        'get_cache_dir': f'{__name__}.get_cache_dir',
    },
    'cupy.cuda.cufft': {'CuFftError': 'cupy.cuda.cufft.CuFFTError'},
    'cupy.cuda.device': {'cusolver_enabled': True},
    'cupy.cuda.memory': {'using_allocator': 'cupy.cuda.using_allocator'},
    'cupy.cuda.runtime': _RUNTIME,
    'cupy.cuda.stream': {'BaseStream': 'cupy.cuda.stream._BaseStream'},
    'cupy.lib': {name: f'cupy.{name}' for name in (
        'poly1d', 'polyadd', 'polymul', 'polysub', 'polyval', 'roots')},
    'cupy.linalg._util': {
        '_assert_nd_squareness': 'cupy.linalg._util._assert_stacked_square',
        '_assert_rank2': 'cupy.linalg._util._assert_2d',
    },
    'cupy.random': {'sample_': 'cupy.random._sample'},
    'cupy.testing': {
        'assert_arrays_almost_equal_nulp': 'cupy.testing.assert_array_almost_equal_nulp',
        'gpu': 'pytest.mark.gpu',
        'numpy_cupy_arrays_almost_equal_nulp': 'cupy.testing.numpy_cupy_array_almost_equal_nulp',
    },
    'cupy.testing._array': {
        'assert_arrays_almost_equal_nulp': 'cupy.testing.assert_array_almost_equal_nulp'},
    'cupy.testing._attr': {'cudnn': 'pytest.mark.cudnn', 'gpu': 'pytest.mark.gpu'},
    'cupy.testing._helper': {
        'numpy_cupy_arrays_almost_equal_nulp': 'cupy.testing.numpy_cupy_array_almost_equal_nulp'},
    'cupy_backends.cuda.api.runtime': _RUNTIME,
    'cupyx.profiler': {'TimeRangeDecorator': 'cupyx.profiler.time_range'},
    'cupyx.profiler._time_range': {'TimeRangeDecorator': 'cupyx.profiler.time_range'},
    'cupyx.scipy': {'ndarray': 'cupy.ndarray', 'spmatrix': 'cupyx.scipy.sparse.spmatrix'},
    'cupyx.scipy.linalg': {name: f'cupy.{name}' for name in ('tri', 'tril', 'triu')},
    'cupyx.scipy.linalg._special_matrices': {
        name: f'cupy.{name}' for name in ('tri', 'tril', 'triu')},
    'cupyx.scipy.sparse': {'linalg': 'cupyx.scipy.sparse.linalg'},
    'cupyx.scipy.special._statistics': {'ndtr': 'cupyx.scipy.special.ndtr'},
}

#: By package: where functions are that its modules had.
ELSEWHERE = {'cupy._core': ('cupy._core', 'cupy'), 'cupy.testing': ('cupy.testing',)}

#: By function: old arguments, and their names of now; None if they have no effect.
ARGUMENTS: dict[str, dict[str, dict[str, str | None]]] = {
    'cupy': {
        'empty_like': {'a': 'prototype'}, 'isscalar': {'num': 'element'},
        'packbits': {'myarray': 'a'}, 'unpackbits': {'myarray': 'a'},
    },
    'cupy._core.fusion': {'fuse': {'input_num': None}},
    'cupyx.scipy.sparse.linalg': {name: {'tol': 'rtol'} for name in ('cg', 'cgs', 'gmres')},
}

#: What has no equivalent, as patterns of names, and what to do instead.
GONE = {
    **dict.fromkeys(
        ('cupy.cuda.cudnn', 'cupy.cuda.cudnn_enabled', 'cupy.cudnn', 'cupyx.cudnn',
         'cupy_backends.cuda.libs.cudnn', 'cupyx.tools.install_library.install_cudnn'),
        'CuPy 14 has no cuDNN. Use functions of Chainer, which use PyTorch if it is installed; or '
        'install CuPy 13.'),
    **dict.fromkeys(
        ('cupy.array_api', 'cupy.array_api.*'),
        'Use cupy itself, which has the functions of the array API standard.'),
    **dict.fromkeys(
        ('cupyx.fallback_mode', 'cupyx.fallback_mode.*'),
        'Convert arrays by cupy.asnumpy where CuPy has no function.'),
    **dict.fromkeys(
        ('cupy.cuda.texture.TextureReference', 'cupy_backends.cuda.api.driver.*[tT]exRef*'),
        'CUDA 12 has no texture references. Use cupy.cuda.texture.TextureObject.'),
    'cupy_backends.cuda.libs.cusparse.*':
        'CUDA 12 has no such function of cuSPARSE. Use cupyx.cusparse or cupyx.scipy.sparse.',
    **dict.fromkeys(
        ('cupy.cuda.cutensor.*', 'cupyx.cutensor.*'),
        'This belongs to cuTENSOR 1. Use the functions of cupyx.cutensor.'),
    'cupy.cuda.cub.*': 'Use the functions of cupy, which call CUB.',
    'cupy.cuda.profiler.*': 'Use cupyx.profiler.profile.',
    'cupy.cuda.function.CInt*': 'Pass integers of NumPy, such as numpy.int32(1), to the kernel.',
    'cupy.MachAr': 'Use cupy.finfo.',
    'cupy.linalg.norm': 'Use cupy.trace.',
    'cupy.testing.*': 'Use the functions of pytest and numpy.testing.',
    'cupyx._runtime.*': 'Use cupyx.get_runtime_info.',
    'cupyx.cusparse.csrmvEx*': 'Use cupyx.cusparse.spmv.',
    **dict.fromkeys(
        ('cupy._core.*', 'cupy.core.*', 'cupy.carray', 'cupy.cuda.*', 'cupy.cuda.internal',
         'cupy.cuda.memory_hook.*', 'cupy.linalg._einsum.*', 'cupy.logic.ufunc',
         'cupy.io.rawfile', 'cupy._io.rawfile',
         'cupy._manipulation.dims.*', 'cupy._math.ufunc.*', 'cupy.random.runtime',
         'cupy_backends.cuda.api.driver.*', 'cupy_backends.cuda.libs.cublas.*',
         'cupy_backends.cuda.libs.curand.*', 'cupyx.scipy.sparse._csr.*',
         'cupyx.scipy.sparse._util.*', 'cupyx.scipy.special._digamma.*'),
        'It was an internal of CuPy, and has no replacement.'),
}


def compile_with_cache(source: str, options: Iterable[str] = (), arch: str | None = None,
                       cache_dir: str | None = None, extra_source: str | None = None,
                       backend: str = 'nvrtc', **others: Any) -> Any:
    """Return the module of a CUDA source. CuPy chooses the folder of its cache."""
    compiler: Any = importlib.import_module('cupy.cuda.compiler')
    return compiler._compile_module_with_cache(
        source, (*options, f'-I{_include()}'), arch=arch, extra_source=extra_source,
        backend=backend, **others)


def _include() -> str:
    """Return the folder of CuPy's headers."""
    return os.path.join(sys.modules['cupy'].__path__[0], '_core', 'include')


def get_cache_dir() -> str:
    """Return the folder of compiled kernels."""
    return os.environ.get('CUPY_CACHE_DIR', os.path.expanduser('~/.cupy/kernel_cache'))


def _with_old_sources(compile_source: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also compiles kernels for CuPy < 14 by CuPy >= 14.

    It only declares ``float16`` in carray.cuh, and its headers require C++17.
    """

    @functools.wraps(compile_source)
    def compile_old(source: str, options: tuple[str, ...] = (), *args: Any, **others: Any) -> Any:
        if 'cupy/carray.cuh' in source and 'cupy/float16.cuh' not in source and re.search(
                r'\bfloat16\b', source):
            source = f'#include <cupy/float16.cuh>\n{source}'
        options = tuple(re.sub(r'^(--?std=c\+\+)(03|11|14)$', r'\g<1>17', each) for each in options)
        return compile_source(source, options, *args, **others)

    return compile_old


def _accepting(function: Callable[..., Any], arguments: dict[str, str | None]
               ) -> Callable[..., Any]:
    """Return the function, which also accepts old names of its arguments."""
    try:
        known = set(inspect.signature(function).parameters)
    except ValueError:  # written in C
        known = set()

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for old, new in arguments.items():
            if old in options and old not in known:
                value = options.pop(old)
                if new is not None:
                    options[new] = value
        return function(*args, **options)

    return call


def current(name: str) -> str | None:
    """Return the name that a module of old versions has now.

    Args:
        name: Name of a module, such as ``cupy.core.core``.

    Returns:
        The name of now, such as ``cupy._core.core``; None if it is not an old one.
    """
    if name in MODULES:
        return MODULES[name]
    parent, _, child = name.rpartition('.')
    package = current(parent) if parent else None
    moved = f'{package or parent}.{child}'
    if moved in MODULES:
        return MODULES[moved]
    if child in UNDERSCORED.get(package or parent, ()):
        return f'{package or parent}._{child}'
    return moved if package else None


def instead(*names: str | None) -> str | None:
    """Return what to do instead of a name that has no equivalent.

    Args:
        names: The name as a program writes it, and that of now.

    Returns:
        A sentence, or None.
    """
    return next((advice for pattern, advice in GONE.items()
                 if any(name and fnmatch.fnmatchcase(name, pattern) for name in names)), None)


def find_path(path: str) -> Any:
    """Return a module, or an attribute of something.

    Args:
        path: For example ``cupy.cuda.nccl.available``.

    Returns:
        The object.

    Raises:
        ImportError: It does not exist.
    """
    parent, _, name = path.rpartition('.')
    if not parent:
        return importlib.import_module(path)
    owner = find_path(parent)
    if not isinstance(owner, ModuleType):
        return getattr(owner, name)
    if name in vars(owner):
        return vars(owner)[name]
    missing = vars(owner).get('__getattr__')
    try:
        # CuPy 14 loads CUDA's libraries here, and not when their modules are imported.
        return missing.find(name) if isinstance(missing, MissingName) else getattr(owner, name)
    except AttributeError:
        return importlib.import_module(path)


#: Old names that this process has used, and what they mean now.
used: dict[str, str] = {}


def is_on() -> bool:
    """Return whether the program asks for old names."""
    return os.environ.get(VARIABLE) == 'all'


class MissingName:
    """Finds what a module does not have: its ``__getattr__``."""

    def __init__(self, module: ModuleType) -> None:
        """Keep the function that the module has."""
        self.module = module
        self.find: Callable[[str], Any] = vars(module).get('__getattr__', self._raise)

    def _raise(self, name: str) -> Any:
        raise AttributeError(f'module {self.module.__name__!r} has no attribute {name!r}',
                             name=name, obj=self.module)

    def __call__(self, name: str) -> Any:
        """Return what an old name means; if names are not restored, the error says how."""
        try:
            return self.find(name)
        except AttributeError as error:
            path = None if name.startswith('__') else self._path(name)
            if path is not None and is_on():
                try:
                    value = find_path(path) if isinstance(path, str) else path
                except ImportError as why:
                    raise AttributeError(f'{error}\n{why}', name=None) from why
                setattr(self.module, name, value)
                old = f'{self.module.__name__}.{name}'
                if path != old:  # a module, which is added when it is loaded
                    used[old] = str(path)
                return value
            advice = HINT if path is not None else instead(f'{self.module.__name__}.{name}')
            if advice is None or name.startswith('__'):
                raise
            # name=None: otherwise, Python appends a similar name to the last line.
            raise AttributeError(f'{error}\n{advice}', name=None) from None

    def _path(self, name: str) -> str | int | None:
        """Return where an old name is now, or its value."""
        module = self.module.__name__
        if name in NAMES.get(module, ()):
            return NAMES[module][name]
        if current(f'{module}.{name}'):
            return f'{module}.{name}'
        return next((f'{place}.{name}' for place in ELSEWHERE.get(_package(module), ())
                     if place != module and name in vars(sys.modules[place])), None)


_COMPLETED = {
    *NAMES, *UNDERSCORED, *ARGUMENTS, *(name.rpartition('.')[0] for name in [*MODULES, *GONE])}


def _package(module: str) -> str:
    return '.'.join(module.split('.')[:2])


def _has_old_names(module: str) -> bool:
    return module in _COMPLETED or _package(module) in ELSEWHERE


def complete(module: ModuleType) -> None:
    """Let a module of CuPy find its old names. Idempotent.

    Args:
        module: The module, which has been executed.
    """
    names, here = vars(module), module.__name__
    if not isinstance(names.get('__getattr__'), MissingName):
        names['__getattr__'] = MissingName(module)
    if not is_on() or _RESTORED in names:
        return
    names[_RESTORED] = True
    for function, arguments in ARGUMENTS.get(here, {}).items():
        if function in names:
            names[function] = _accepting(names[function], arguments)
    if here == 'cupy.cuda.compiler' and os.path.exists(f'{_include()}/cupy/float16.cuh'):
        names['_compile_module_with_cache'] = _with_old_sources(
            names['_compile_module_with_cache'])
    _keep_functions(here, module)


_RESTORED = '_chainer_compat_restored'


def _keep_functions(old: str, package: ModuleType) -> None:
    """Let modules be imported that have the name of a function.

    Otherwise, ``import cupy.fft.fft`` would set ``cupy.fft.fft``, the function, to the module.
    """
    for child in UNDERSCORED.get(package.__name__, ()):
        moved = sys.modules.get(f'{package.__name__}._{child}')
        if child in vars(package) and moved is not None:
            sys.modules.setdefault(f'{old}.{child}', moved)


def _load(old: str, now: str) -> ModuleType:
    """Return the module that replaces an old one."""
    try:
        module: ModuleType = find_path(now)
    except ModuleNotFoundError as error:
        why = instead(old, now) or error
        raise ModuleNotFoundError(f'No module named {old!r}\n{why}') from error
    _keep_functions(old, module)
    used[old] = now
    return module


def find_spec(asking: Any, name: str, path: Any, target: Any) -> ModuleSpec | None:
    """Return the spec of an old module, or of one that has old names.

    Args:
        asking: The finder that Python has asked.
        name: Name of the module.
        path: Folders of its package.
        target: The module, if it is loaded again.

    Returns:
        The spec, or None if other finders know the module.

    Raises:
        ModuleNotFoundError: The module is an old one, and not restored.
    """
    now = current(name)
    if now is None and name not in GONE and not _has_old_names(name):
        return None
    parent = name.rpartition('.')[0]
    if not parent or getattr(sys.modules[parent], '__name__', parent) == parent:
        spec = loader.find_original_spec(asking, name, path, target)
        if spec is not None and spec.loader is not None and _has_old_names(name):
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                complete(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        if spec is not None or (now is None and name not in GONE):
            return spec
    if now is not None and is_on():
        return ModuleSpec(name, loader.MovedLoader(functools.partial(_load, name, now)))
    # No name=: otherwise, ``from cupy import core`` does not show the message.
    raise ModuleNotFoundError(f'No module named {name!r}\n{GONE.get(name, HINT)}')


class CupyFinder:
    """Finds CuPy's modules as usual, and old ones, where ``ChainerFinder`` is not used."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Handle the imports of CuPy's modules."""
        return find_spec(cls, name, path, target) if name.startswith('cupy') else None


def restore() -> None:
    """Restore the names of modules that the program has imported before."""
    for name, module in list(sys.modules.items()):
        if _has_old_names(name) and module.__name__ == name:
            complete(module)
