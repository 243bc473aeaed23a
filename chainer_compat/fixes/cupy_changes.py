"""Changes in CuPy since Chainer 7.8.1."""

from typing import Any

from chainer_compat.patching.registry import edit, patch, version


@patch('chainer.backends.cuda')
def cudnn_warning(cuda: Any) -> None:
    """CuPy >= 14 does not support cuDNN, but Chainer advised installing it."""
    if version('cupy') >= (14, 0):
        cuda.check_cuda_available._already_warned = True


@edit(
    'chainer.functions.array.resize_images',
    'chainer.functions.loss.negative_sampling',
    'chainer.links.loss.hierarchical_softmax',
)
def atomic_add_of_float16() -> dict[str, str]:
    """CuPy >= 14 computes float16 in float32, and ``atomicAdd(float16*, float)`` does not exist."""
    if version('cupy') < (14, 0):
        return {}
    products = ['w0 * gy', 'w1 * gy', 'w2 * gy', 'w3 * gy', 'g * w[w_ind]', 'g * x[x_ind]',
                'gi * x[(i / m) * c + j]']
    return {f', {product});': f', (T)({product}));' for product in products}


@edit('chainer.functions.math.clip')
def dtype_of_clip() -> dict[str, str]:
    """All versions: on a GPU, F.clip returned the dtype that CuPy promotes to.

    Array bounds could change the dtype, and with CuPy >= 14, so could NumPy scalars. Then
    backward of F.clip and F.huber_loss raised TypeError. On the CPU, Chainer converts the result.
    """
    clip = 'cuda.cupy.clip(x[0], self.x_min, self.x_max)'
    return {f'return {clip},': f'return {clip}.astype(x[0].dtype, copy=False),'}


@edit(
    'chainer.functions.array.as_strided',
    'chainer.functions.array.get_item',
    'chainer.functions.array.scatter_add',
    'chainer.functions.array.spatial_transformer_sampler',
    'chainer.utils.sparse',
)
def scatter_add() -> dict[str, str]:
    """CuPy >= 14 deprecates ``scatter_add``, which the gradient of F.get_item and others use."""
    if version('cupy') < (14, 0):
        return {}
    return {'gx.scatter_add(': 'chainer.backends.cuda.cupy.add.at(gx, ',
            'cuda.cupyx.scatter_add': 'cuda.cupy.add.at'}


@edit('chainer.distributions.geometric')
def geometric_of_float16() -> dict[str, str]:
    """CuPy >= 14 cannot convert a Geometric sample to float16.

    The conversion of its ``long`` is ambiguous in C++.
    """
    if version('cupy') < (14, 0):
        return {}
    return {'size=(n,)+self.batch_shape, dtype=self.p.dtype)':
            'size=(n,)+self.batch_shape).astype(self.p.dtype)'}


@edit('chainer.training.updaters.multiprocess_parallel_updater')
def float16_header() -> dict[str, str]:
    """CuPy >= 14 defines ``float16`` in a separate header, which kernels must include."""
    if version('cupy') < (14, 0):
        return {}
    names = ["'_memcpy_gather',", "'_memcpy_scatter',"]
    return {name: rf"{name} preamble='#include <cupy/float16.cuh>\n'," for name in names}


@patch('chainer.training.updaters.multiprocess_parallel_updater')
def nccl_available(updater: Any) -> None:
    """CuPy >= 8 can be imported without the NCCL library; then ``nccl.available`` is False.

    MultiprocessParallelUpdater.available() returned True, but the constructor failed.
    """
    updater._available = updater._available and updater.nccl.available
