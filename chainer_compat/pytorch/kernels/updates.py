"""Updates of many parameters by PyTorch's fused optimizers, with Chainer's formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from chainer.optimizers.ada_grad import AdaGradRule
from chainer.optimizers.adam import AdamRule
from chainer.optimizers.momentum_sgd import MomentumSGDRule
from chainer.optimizers.sgd import SGDRule

from chainer_compat.pytorch.tensors.arrays import FLOATS, tensor
from chainer_compat.pytorch.unsupported import Unsupported
from chainer_compat.updates import one_pass
from chainer_compat.updates.fused_option import fused_updates

if TYPE_CHECKING:
    from chainer_compat.updates.update_groups import Array, Member
    from chainer_compat.updates.update_plans import Kept

    #: A function that takes lists of tensors: data, gradients and each state.
    Kernel = Callable[..., None]


#: Groups of up to this many bytes keep their gradients until the next update.
SMALL = 1 << 20


def update_group(rule: Any, members: list[Member], grads: list[Array], kept: Kept | None = None
                 ) -> None:
    """Update parameters with identical rules.

    Raises:
        Unsupported: For other rules, or if ``chainer.config.fused_updates`` is off.
    """
    call = _kernel(rule, len(members))
    data, *states = _tensors(members) if kept is None else _kept_tensors(members, kept)
    call(data, _gradient_tensors(grads, kept), *states)


def _tensors(members: list[Member]) -> list[tuple[torch.Tensor, ...]]:
    """Return tensors of the data, and of each state."""
    for member in members:
        if member.tensors is None:
            member.tensors = [_shared(array) for array in (member.data, *member.states)]
    return [*zip(*[member.tensors for member in members], strict=True)]


def _kept_tensors(members: list[Member], kept: Kept) -> list[tuple[torch.Tensor, ...]]:
    if kept.tensors is None:
        kept.tensors = _tensors(members)
        kept.is_small = sum([member.data.nbytes for member in members]) <= SMALL
    return kept.tensors


def _gradient_tensors(grads: list[Array], kept: Kept | None) -> list[torch.Tensor]:
    """Return tensors of gradients; in small groups, reuse those of unchanged arrays."""
    if kept is None or not kept.is_small:
        return [_shared(grad) for grad in grads]
    if len(kept.gradients) != len(grads) or not all(map(is_, kept.gradients, grads)):
        kept.gradients, kept.gradient_tensors = grads, [_shared(grad) for grad in grads]
    return kept.gradient_tensors


def _shared(array: Array) -> torch.Tensor:
    """Return a tensor that shares the memory of a contiguous array."""
    try:
        return torch.from_numpy(array)
    except ValueError:  # an axis of one element with a negative or unusual stride
        return torch.from_numpy(array.squeeze().reshape(array.shape))


def update_core(rule: Any, param: Any) -> None:
    """Update one parameter like ``UpdateRule.update_core_cpu``, but with the rounding of a group.

    Ranks must get bitwise identical results, even if only one of them has a hook for the parameter.

    Raises:
        Unsupported: In the same cases as :func:`update_group`, and for other dtypes.
    """
    arrays = [param.data, *(rule.state or {}).values()]
    if not all(type(array) is np.ndarray and array.dtype in FLOATS
               and array.shape == arrays[0].shape and array.dtype == arrays[0].dtype
               for array in [*arrays, param.grad]):
        raise Unsupported  # a missing gradient or array, for example
    if not one_pass.is_unchanged(type(rule)) or one_pass.share_memory([param.grad, *arrays]):
        raise Unsupported
    call = _kernel(rule, 1)
    used = [array if array.flags.carray else array.copy() for array in arrays]
    call(*([each] for each in (_shared(used[0]), tensor(param.grad), *map(_shared, used[1:]))))
    for array, result in zip(arrays, used, strict=True):
        if array is not result:
            array[...] = result


def _kernel(rule: Any, n: int) -> Kernel:
    kernel = KERNELS.get(type(rule).update_core_cpu)
    if kernel is None or not fused_updates():
        raise Unsupported
    return kernel(rule, [*rule._state], n)


def _numbers(rule: Any, *names: str) -> list[float]:
    values = [getattr(rule.hyperparam, name) for name in names]
    if not all(isinstance(value, float | int) for value in values):
        raise Unsupported  # arrays, for example
    return [float(value) for value in values]


def _adam(rule: Any, names: list[str], n: int) -> Kernel:
    alpha, beta1, beta2, eps, eta, decay = _numbers(
        rule, 'alpha', 'beta1', 'beta2', 'eps', 'eta', 'weight_decay_rate')
    amsgrad = bool(rule.hyperparam.amsgrad)
    if (rule.hyperparam.adabound or names != ['m', 'v', 'vhat'][:2 + amsgrad]
            or (decay and not alpha) or not (0 <= beta1 < 1 and 0 <= beta2 < 1)):
        raise Unsupported
    rule._check_eps(rule._state['m'].dtype.type)
    steps = [torch.from_numpy(np.array(rule.t, np.float32))] * n  # torch.tensor takes 10 us
    options = {
        'lr': alpha * eta, 'beta1': beta1, 'beta2': beta2,
        # Chainer adds eps to v before the bias correction.
        'eps': eps / math.sqrt(1 - beta2 ** rule.t),
        'weight_decay': decay / alpha if decay else 0., 'amsgrad': amsgrad, 'maximize': False}
    function = torch._fused_adamw_ if decay else torch._fused_adam_
    empty: list[torch.Tensor] = []

    def call(data: Any, grads: Any, m: Any, v: Any, vhat: Any = empty) -> None:
        function(data, grads, m, v, vhat, steps, **options)

    return call


def _ada_grad(rule: Any, names: list[str], n: int) -> Kernel:
    if names != ['h']:
        raise Unsupported
    lr, eps = _numbers(rule, 'lr', 'eps')
    steps = [torch.tensor(float(rule.t)) for _ in range(n)]

    def call(data: Any, grads: Any, h: Any) -> None:
        torch._fused_adagrad_(data, grads, h, steps, lr=lr, lr_decay=0., weight_decay=0., eps=eps,
                              maximize=False)

    return call


def _momentum_sgd(rule: Any, names: list[str], n: int) -> Kernel:
    if names != ['v']:
        raise Unsupported
    lr, momentum = _numbers(rule, 'lr', 'momentum')
    # Without momentum, PyTorch has no velocity. With the dampening below, PyTorch multiplies the
    # gradient by 1 - (1 + lr). For smaller rates, its error exceeds the rounding of lr to float32.
    if not momentum or lr < 1e-9 or rule._state['v'].dtype != np.float32:
        raise Unsupported

    def call(data: Any, grads: Any, v: Any) -> None:
        # Chainer's velocity contains the learning rate.
        torch._fused_sgd_(data, grads, v, lr=-1., momentum=momentum, dampening=1 + lr, **_SGD)

    return call


def _sgd(rule: Any, names: list[str], n: int) -> Kernel:
    if names:
        raise Unsupported
    lr, = _numbers(rule, 'lr')

    def call(data: Any, grads: Any) -> None:
        torch._fused_sgd_(data, grads, [], lr=lr, momentum=0., dampening=0., **_SGD)

    return call


_SGD: dict[str, Any] = {
    'weight_decay': 0., 'nesterov': False, 'maximize': False, 'is_first_step': False}

KERNELS: dict[Any, Callable[[Any, list[str], int], Kernel]] = {
    AdaGradRule.update_core_cpu: _ada_grad,
    AdamRule.update_core_cpu: _adam,
    MomentumSGDRule.update_core_cpu: _momentum_sgd,
    SGDRule.update_core_cpu: _sgd,
}
