"""PyTorch computes for Chainer, where it is installed: chainer_compat/torch_kernels."""

from types import ModuleType

from chainer_compat._patch import patch
from chainer_compat.torch_kernels import BACKWARD, KERNELS, OF_IMAGES, compute_dtype, dispatch


@patch(*KERNELS)
def torch_kernels(module: ModuleType) -> None:
    """All versions: functions use PyTorch's kernels if PyTorch is installed."""
    if module.__name__ == 'chainer.functions.connection.convolution_2d':
        owner = module.Convolution2DFunction
        owner._forward_gpu_core = dispatch.advising(owner._forward_gpu_core)
    for name, kernel in {
            **KERNELS[module.__name__], **BACKWARD.get(module.__name__, {})}.items():
        dispatch.replace(module, name, kernel)


@patch(*OF_IMAGES)
def images_with_channels_last(module: ModuleType) -> None:
    """All versions: dropout, sums and means of images that PyTorch's kernels return are faster."""
    for name, kernel in OF_IMAGES[module.__name__].items():
        dispatch.replace(module, name, kernel, lambda *args, **kwargs: False)


@patch('chainer')
def use_torch(module: ModuleType) -> None:
    """All versions: CHAINER_USE_TORCH sets the new option ``chainer.config.use_torch``."""
    module.global_config.use_torch = dispatch.default_mode()


@patch('chainer')
def torch_compute_dtype(module: ModuleType) -> None:
    """All versions: CHAINER_TORCH_COMPUTE_DTYPE sets the option ``config.torch_compute_dtype``."""
    module.global_config.torch_compute_dtype = compute_dtype.default()
