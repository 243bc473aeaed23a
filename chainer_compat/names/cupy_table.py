"""Names of CuPy 1 to 12 that CuPy 13 or 14 does not have, and their replacements."""

from __future__ import annotations

#: Old modules and their current names. Their submodules have moved with them.
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

#: By package: the modules whose names now begin with an underscore.
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

#: Constants of CUDA that CuPy no longer exports.
_RUNTIME: dict[str, str | int] = {
    'deviceAttributeComputeCapabilityMajor': 75, 'deviceAttributeComputeCapabilityMinor': 76,
    'errorInvalidValue': 1, 'errorMemoryAllocation': 2,
}

#: Maps the current name of a module to its old names. Each has the path of its replacement, or its
#: value.
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
        'compile_with_cache': 'chainer_compat.names.cupy_kernels.compile_with_cache',
        'cusolver_enabled': True,
        'cutensor': 'cupy.cuda.cutensor', 'nccl': 'cupy.cuda.nccl',
        **{f'{name}_enabled': f'cupy.cuda.{name}.available'
           for name in ('cub', 'cutensor', 'nccl', 'nvtx', 'thrust')},
    },
    'cupy.cuda.compiler': {
        'TemporaryDirectory': 'tempfile.TemporaryDirectory',
        'compile_with_cache': 'chainer_compat.names.cupy_kernels.compile_with_cache',
        'get_cache_dir': 'chainer_compat.names.cupy_kernels.get_cache_dir',
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

#: By package: where to look for functions that have moved to a different module.
ELSEWHERE = {'cupy._core': ('cupy._core', 'cupy'), 'cupy.testing': ('cupy.testing',)}

#: Maps functions and methods to old arguments and their current names. ``None`` means that the
#: argument is ignored, ``.astype`` that this method is applied to the result.
ARGUMENTS: dict[str, dict[str, dict[str, str | None]]] = {
    'cupy': {
        **{name: {'dtype': '.astype'} for name in (
            'amax', 'amin', 'max', 'min', 'ndarray.max', 'ndarray.min')},
        'empty_like': {'a': 'prototype'}, 'isscalar': {'num': 'element'},
        'packbits': {'myarray': 'a'}, 'unpackbits': {'myarray': 'a'},
    },
    'cupy._core.fusion': {'fuse': {'input_num': None}},
    'cupy.random': {'RandomState.permutation': {'num': 'a'}},
    'cupyx.scipy.sparse.linalg': {name: {'tol': 'rtol'} for name in ('cg', 'cgs', 'gmres')},
}

#: Patterns of names without an equivalent, and advice on them.
REMOVED = {
    **dict.fromkeys(
        ('cupy.cuda.cudnn', 'cupy.cuda.cudnn_enabled', 'cupy.cudnn', 'cupyx.cudnn',
         'cupy_backends.cuda.libs.cudnn', 'cupyx.tools.install_library.install_cudnn'),
        'CuPy 14 does not support cuDNN. Use Chainer functions (they use PyTorch if it is '
        'installed), or install CuPy 13.'),
    **dict.fromkeys(
        ('cupy.array_api', 'cupy.array_api.*'),
        'Use cupy itself, which has the functions of the array API standard.'),
    **dict.fromkeys(
        ('cupyx.fallback_mode', 'cupyx.fallback_mode.*'),
        'Convert arrays with cupy.asnumpy if CuPy does not have a function.'),
    **dict.fromkeys(
        ('cupy.cuda.texture.TextureReference', 'cupy_backends.cuda.api.driver.*[tT]exRef*'),
        'CUDA 12 has no texture references. Use cupy.cuda.texture.TextureObject.'),
    'cupy_backends.cuda.libs.cusparse.*':
        'cuSPARSE in CUDA 12 does not have this function. Use cupyx.cusparse or '
        'cupyx.scipy.sparse.',
    **dict.fromkeys(
        ('cupy.cuda.cutensor.*', 'cupyx.cutensor.*'),
        'This belongs to cuTENSOR 1. Use the functions of cupyx.cutensor.'),
    'cupy.cuda.cub.*': 'Use the functions of cupy, which call CUB.',
    'cupy.cuda.profiler.*': 'Use cupyx.profiler.profile.',
    'cupy.cuda.function.CInt*': 'Pass NumPy integers, such as numpy.int32(1), to the kernel.',
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
        'It was internal to CuPy and has no replacement.'),
}
