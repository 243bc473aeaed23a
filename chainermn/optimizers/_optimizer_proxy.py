"""A proxy of an optimizer, whose gradients are computed as by ``Optimizer.update``."""
from __future__ import annotations

from collections.abc import Iterable

import chainer

from chainermn._types import Optimizer, Parameter, Variable
from chainermn.optimizers._delegate import Delegate


class OptimizerProxy(Delegate, wraps='actual_optimizer'):
    """The base class of optimizers whose gradients are exchanged between ranks."""

    actual_optimizer: Optimizer


def compute_gradients(optimizer: Optimizer, loss: Variable) -> None:
    """Replace the gradients of all parameters of an optimizer by those of a loss.

    Raises:
        ValueError: If the loss is not a scalar, so that backward fails.
    """
    if getattr(optimizer, '_use_cleargrads', True):
        optimizer.target.cleargrads()
    else:
        optimizer.target.zerograds()
    # With communication in the graph, backward may start at a loss that is not a scalar.
    is_scalar = getattr(loss, 'size', 1) <= 1 or loss.grad is not None
    try:
        loss.backward(loss_scale=getattr(optimizer, '_loss_scale', None))
    except Exception as error:
        if is_scalar:
            raise
        raise ValueError(f'the loss of update(lossfun, ...) has the shape {loss.shape}; return a '
                         'scalar, such as F.mean(loss).') from error
    keep_scale(optimizer)


def keep_scale(optimizer: Optimizer) -> None:
    """Let the update rules divide all gradients by the loss scale.

    Backward sets the scale of a parameter only if this rank's loss used it, but the mean gradients
    of the others are scaled, too.
    """
    scale = getattr(optimizer, '_loss_scale', None)
    if scale is not None:
        for param in optimizer.target.params():
            param._loss_scale = scale


def once(named: Iterable[tuple[str, Parameter]]) -> dict[str, Parameter]:
    """Return parameters by path, shared ones by their first path only."""
    paths: dict[int, str] = {}
    return {path: param for path, param in named if paths.setdefault(id(param), path) == path}


def fill_missing_grad(param: Parameter) -> None:
    """Give a parameter that the loss did not use a gradient of zero."""
    if param.grad is None:
        with chainer.using_device(param.device):
            param.grad = param.xp.zeros_like(param.array)
