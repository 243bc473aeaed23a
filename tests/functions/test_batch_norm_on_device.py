"""The kernels of multi-node batch normalization compile; tests/gpu tests what they compute."""

import numpy as np
import nvrtc
import pytest

from chainermn.functions import _batch_norm_on_device

pytestmark = [pytest.mark.mpi_skip, pytest.mark.limit(300)]

NDARRAY, INDEXER, SCALAR = 1, 2, 3  # as in cupy/_core/_kernel.pxd


@pytest.fixture(scope='module')
def compile_for_h100():
    return nvrtc.compiler()


def infos(params, dtypes):
    """Describe the arguments of a kernel as CuPy does: arrays of four dimensions, and scalars."""
    import cupy
    from cupy._core import _carray, _kernel, _scalar

    for param in params:
        if param.ctype is None:
            yield _kernel._ArgInfo(INDEXER, _carray.Indexer, None, 4, True, True)
        elif param.name in ('scale', 'decay', 'n_ranks', '_block_stride'):
            dtype = np.dtype(param.dtype or dtypes[param.ctype]).type
            yield _kernel._ArgInfo(SCALAR, _scalar.CScalar, dtype, 0, True, True)
        else:
            yield _kernel._ArgInfo(
                NDARRAY, cupy.ndarray, np.dtype(dtypes[param.ctype]).type,
                1 if param.raw else 4, False, True)


def source(name, dtypes):
    """Return the CUDA source that CuPy makes of a kernel, for dtypes by their letters."""
    from cupy._core import _kernel, _reduction

    kernel = _batch_norm_on_device.kernel(name)
    types = _kernel._TypeMap(tuple(sorted(
        (letter, np.dtype(dtype).type) for letter, dtype in dtypes.items())))
    if hasattr(kernel, 'operation'):
        return _kernel._get_elementwise_kernel_code(
            tuple(infos(kernel.params, dtypes)), types, kernel.params, kernel.operation,
            kernel.name, kernel.preamble, loop_prep='', after_loop='')
    # CuPy chooses the type of indices by the sizes of the arrays.
    return 'typedef ptrdiff_t IndexT;\n' + _reduction._ReductionKernel_get_cached_function_code(
        kernel.nin, kernel.nout, kernel._params, tuple(infos(kernel._params, dtypes)), types,
        kernel.name, 512, kernel.out_params[0].ctype, kernel.identity, kernel.map_expr,
        kernel.reduce_expr, kernel.post_map_expr, kernel.preamble, kernel.options)


@pytest.mark.parametrize('x, gamma', list(map(tuple, ['ee', 'ef', 'fe', 'ff', 'fd', 'ed', 'dd'])))
@pytest.mark.parametrize('name', _batch_norm_on_device.KERNELS)
def test_compiles_for_h100(compile_for_h100, name, x, gamma):
    both = np.promote_types(x, gamma)
    letters = {'T': x, 'G': x, 'A': gamma, 'M': both, 'W': np.promote_types(both, 'f')}
    text = ' '.join(_batch_norm_on_device.KERNELS[name][1:3])
    compile_for_h100(source(name, {
        letter: dtype for letter, dtype in letters.items() if f'{letter} ' in text}))
