"""PyTorch computes for Chainer, where it is installed: chainer_compat/torch_kernels."""

from types import ModuleType

from chainer_compat._patch import patch
from chainer_compat.torch_kernels import BACKWARD, KERNELS, compute_dtype, dispatch


@patch(*KERNELS)
def torch_kernels(module: ModuleType) -> None:
    """All versions: functions use PyTorch's kernels if PyTorch is installed."""
    for name, kernel in {
            **KERNELS[module.__name__], **BACKWARD.get(module.__name__, {})}.items():
        dispatch.replace(module, name, kernel)


@patch('chainer')
def use_torch(module: ModuleType) -> None:
    """All versions: CHAINER_USE_TORCH sets the new option ``chainer.config.use_torch``."""
    module.global_config.use_torch = dispatch.default_mode()


@patch('chainer')
def torch_compute_dtype(module: ModuleType) -> None:
    """All versions: CHAINER_TORCH_COMPUTE_DTYPE sets the option ``config.torch_compute_dtype``."""
    module.global_config.torch_compute_dtype = compute_dtype.default()
