"""Updates of many parameters on a GPU with one launch of a rule's kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from chainer_compat.updates import elementwise
from chainer_compat.updates.block_updates import Block

if TYPE_CHECKING:
    from chainer_compat.updates.update_groups import Array, Member


def update_group(rule: Any, members: list[Member], grads: list[Array],
                 loss_scale: float | None) -> None:
    """Update parameters on one GPU, with one launch if the rule launches one kernel for each.

    Gradients are divided by the loss scale first.
    """
    from chainer.backends.cuda import cupy

    names, states = [*rule._state], rule._state
    first = Block(members[0].data, grads[0])
    with cupy.cuda.Device(members[0].device):
        with elementwise.recorded() as calls:
            if _can_be_recorded(rule):
                rule.update_core_gpu(first)
        if len(calls) == 1 and elementwise.launch(
                calls[0], [first.data, first.grad, *members[0].states],
                [[member.data for member in members], grads,
                 *zip(*(member.states for member in members), strict=True)],
                None if loss_scale is None else 1, 1. if loss_scale is None else loss_scale):
            return
        try:
            for member, grad in zip(members, grads, strict=True):
                if loss_scale is not None:
                    grad /= loss_scale
                rule._state = dict(zip(names, member.states, strict=True))
                rule.update_core_gpu(Block(member.data, grad))
        finally:
            rule._state = states


def cast(arrays: list[Any], results: list[Any]) -> list[Any]:
    """Cast CuPy arrays to given arrays, or to new arrays of given dtypes, with one launch."""
    from chainer.backends.cuda import cupy

    with cupy.cuda.Device(arrays[0].data.device_id):
        results = [cupy.empty(array.shape, result) if isinstance(result, np.dtype) else result
                   for array, result in zip(arrays, results, strict=True)]
        kernel = elementwise.elementwise('S x', 'T y', 'y = (T)x', 'cast')
        elementwise.launch((kernel, (arrays[0], results[0])), [arrays[0], results[0]],
                           [arrays, results])
    return results


def _can_be_recorded(rule: Any) -> bool:
    """Return whether all kernels are Chainer's. Others would be launched instead of recorded."""
    return all(value is None or type(value) is elementwise.Kernel
               for name, value in vars(type(rule)).items() if name.endswith('_kernel'))
