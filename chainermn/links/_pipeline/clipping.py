"""An optimizer hook that clips the gradients of all stages by their global norm."""
from __future__ import annotations

import math
from collections.abc import Callable

from chainer_compat.updates import update_hooks
from chainermn._types import Optimizer, Parameter
from chainermn.communicators.communicator_base import CommunicatorBase


class GradientClipping:
    """Like ``chainer.optimizer_hooks.GradientClipping``, but for the model on all ranks.

    Args:
        comm: The communicator of the pipeline.
        threshold: The maximum norm.
        is_counted: Function that returns whether this rank counts a parameter. A tied parameter is
            counted by one rank only.
    """

    name = 'GradientClipping'
    call_for_each_param = False
    timing = 'pre'

    def __init__(self, comm: CommunicatorBase, threshold: float,
                 is_counted: Callable[[Parameter], bool]) -> None:
        self._comm, self.threshold, self._is_counted = comm, threshold, is_counted

    def __call__(self, optimizer: Optimizer) -> None:
        """Scale the gradients. Collective: every rank calls it."""
        params = {id(param): param for param in optimizer.target.params(False)
                  if param.grad is not None}.values()
        local = sum((float((param.grad.astype('d') ** 2).sum()) / (param._loss_scale or 1) ** 2
                     for param in params if self._is_counted(param)), 0.)
        with self._comm.called_by('Pipeline.gradient_clipping'):
            norm = math.sqrt(self._comm.allreduce_obj(local))
        if norm > self.threshold:
            for param in params:
                param.grad *= param.dtype.type(self.threshold / norm)


update_hooks.accept_scaled(GradientClipping)
