"""Shims that make Chainer compute with PyTorch if it is installed."""

from types import ModuleType
from typing import Any

from chainer_compat.patching.registry import patch
from chainer_compat.pytorch import dispatch
from chainer_compat.pytorch.kernels import BACKWARD, KERNELS, OF_IMAGES
from chainer_compat.pytorch.tensors import compute_dtype
from chainer_compat.updates.optimizer_updates import RULES


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
    """All versions: dropout, sum and mean are faster on images returned by PyTorch's kernels."""
    for name, kernel in OF_IMAGES[module.__name__].items():
        dispatch.replace(module, name, kernel, lambda *args, **kwargs: False)


@patch('chainer')
def use_torch(module: ModuleType) -> None:
    """All versions: CHAINER_USE_TORCH sets the new option ``chainer.config.use_torch``."""
    from chainer_compat.graph import nodes

    module.global_config.use_torch = dispatch.default_mode()
    nodes.record = dispatch.record_first


@patch('chainer', *RULES)
def fused_updates(module: ModuleType) -> None:
    """All versions: PyTorch updates parameters if ``chainer.config.fused_updates`` is true.

    CHAINER_FUSED_UPDATES sets this new option.
    """
    from chainer_compat.updates import block_updates, fused_option, one_pass

    if module.__name__ == 'chainer':
        module.global_config.fused_updates = fused_option.default_fused_updates()
        dispatch.replace(block_updates, 'update_group', 'updates.update_group', _is_large_group)
        return
    name = RULES[module.__name__]
    dispatch.replace(module, f'{name}.update_core_cpu', 'updates.update_core', _is_large_parameter)
    # Register the rule again: one_pass stores its functions, and one was just replaced.
    one_pass.accept(getattr(module, name))


#: Minimum number of elements for which an update imports PyTorch; the import takes seconds.
MANY = 1 << 22


def _is_large_group(rule: Any, members: list[Any], *args: Any) -> bool:
    return _is_worth_importing(sum([member.size for member in members]))


def _is_large_parameter(rule: Any, param: Any) -> bool:
    return _is_worth_importing(0 if param.data is None else param.data.size)


def _is_worth_importing(n_elements: int) -> bool:
    """Return whether an update imports PyTorch, if no other function has done so yet."""
    from chainer_compat.updates.fused_option import fused_updates

    option = fused_updates()
    return n_elements >= MANY if option == 'auto' else bool(option)


@patch('chainer')
def torch_compute_dtype(module: ModuleType) -> None:
    """All versions: CHAINER_TORCH_COMPUTE_DTYPE sets the option ``config.torch_compute_dtype``."""
    module.global_config.torch_compute_dtype = compute_dtype.default()
