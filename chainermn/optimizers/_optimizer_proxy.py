"""A proxy of an optimizer, whose gradients are computed as by ``Optimizer.update``."""
from __future__ import annotations

import chainer

from chainermn._types import Optimizer, Parameter, Variable
from chainermn.optimizers._delegate import Delegate


class OptimizerProxy(Delegate, wraps='actual_optimizer'):
    """The base class of optimizers whose gradients are exchanged between ranks."""

    actual_optimizer: Optimizer


def compute_gradients(optimizer: Optimizer, loss: Variable) -> None:
    """Replace the gradients of all parameters of an optimizer by those of a loss."""
    if getattr(optimizer, '_use_cleargrads', True):
        optimizer.target.cleargrads()
    else:
        optimizer.target.zerograds()
    loss.backward(loss_scale=getattr(optimizer, '_loss_scale', None))
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


def fill_missing_grad(param: Parameter) -> None:
    """Give a parameter that the loss did not use a gradient of zero."""
    if param.grad is None:
        with chainer.using_device(param.device):
            param.grad = param.xp.zeros_like(param.array)
