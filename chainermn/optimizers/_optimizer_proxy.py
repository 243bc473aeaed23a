"""A proxy of an optimizer: computes gradients as ``Optimizer.update`` does, but exchanges them."""
from __future__ import annotations

import chainer

from chainermn._types import Optimizer, Parameter, Variable
from chainermn.optimizers._delegate import Delegate


class OptimizerProxy(Delegate, wraps='actual_optimizer'):
    """The base class of optimizers whose gradients are exchanged between ranks."""

    actual_optimizer: Optimizer

    def _compute_gradients(self, loss: Variable) -> None:
        """Replace the gradients of all parameters by those of a loss."""
        optimizer = self.actual_optimizer
        if getattr(optimizer, '_use_cleargrads', True):
            optimizer.target.cleargrads()
        else:
            optimizer.target.zerograds()
        loss.backward(loss_scale=getattr(optimizer, '_loss_scale', None))
        self._keep_scale()

    def _keep_scale(self) -> None:
        """Let the update rules divide all gradients by the loss scale.

        Backward sets the scale of a parameter only if this rank's loss used it, but the mean
        gradients of the others are scaled, too.
        """
        scale = getattr(self.actual_optimizer, '_loss_scale', None)
        if scale is not None:
            for param in self.actual_optimizer.target.params():
                param._loss_scale = scale


def fill_missing_grad(param: Parameter) -> None:
    """Give a parameter that the loss did not use a gradient of zero."""
    if param.grad is None:
        with chainer.using_device(param.device):
            param.grad = param.xp.zeros_like(param.array)
