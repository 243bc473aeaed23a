"""The multi-node optimizer: average the gradients of all ranks, then step."""
from __future__ import annotations

from typing import Any

import chainer
import numpy as np

from chainermn._delegate import Delegate
from chainermn.communicators.communicator_base import CommunicatorBase


class _MultiNodeOptimizer(Delegate, wraps='actual_optimizer'):
    """See :func:`chainermn.create_multi_node_optimizer`."""

    actual_optimizer: Any
    communicator: CommunicatorBase
    target_params: list[tuple[str, bool]]
    zero_fill: bool

    def __init__(
        self, actual_optimizer: Any, communicator: CommunicatorBase, zero_fill: bool
    ) -> None:
        super().__init__(actual_optimizer)
        self.communicator = communicator
        self.target_params = []
        self.zero_fill = zero_fill

    def setup(self, link: Any) -> Any:
        """Sets the model to train; see :meth:`chainer.Optimizer.setup`.

        Returns:
            This proxy, so that ``optimizer = create_multi_node_optimizer(...).setup(model)``
            keeps the multi-node optimizer.
        """
        self.actual_optimizer.setup(link)
        self.target_params = []  # another model: the next update broadcasts it
        return self

    def update(self, lossfun: Any = None, *args: Any, **kwds: Any) -> None:
        """Averages the gradients over all ranks and steps.  Collective: every rank calls it.

        Args:
            lossfun: Function of ``args`` and ``kwds`` that returns the loss, a scalar Variable.
                If ``None``, the gradients that the parameters have now are used.
        """
        self.actual_optimizer._check_set_up()
        if lossfun is not None:
            self._backward(lossfun, *args, **kwds)
        if self.is_changed(self.target):
            self._broadcast()
        else:
            self._step(*args, **kwds)

    def is_changed(self, target: Any) -> bool:
        """Whether the parameters of ``target`` are not those of the last call.

        They are the same if there are the same names, and the same of them are initialized.
        """
        before = self.target_params
        self.target_params = [(name, param.is_initialized)
                              for name, param in sorted(target.namedparams())]
        return self.target_params != before

    def _backward(self, lossfun: Any, *args: Any, **kwds: Any) -> None:
        loss = lossfun(*args, **kwds)
        if getattr(self.actual_optimizer, '_use_cleargrads', True):
            self.target.cleargrads()
        else:
            self.target.zerograds()
        scale = self.actual_optimizer._loss_scale
        loss.backward(loss_scale=scale)
        if scale is not None:
            # The update rule divides by the scale that backward left in the parameter. One that
            # this rank's loss did not use has none, but its mean gradient is scaled all the same.
            for param in self.target.params():
                param._loss_scale = scale

    def _broadcast(self) -> None:
        self.communicator.bcast_data(self.target)
        for param in self.target.params():
            rule = param.update_rule
            if param.is_initialized and rule is not None and rule.enabled and rule.state is None:
                # As the first step would: Chainer loads no snapshot that was taken without them.
                rule._init_states(_as_updated(rule, param))

    def _step(self, *args: Any, **kwds: Any) -> None:
        self.communicator.multi_node_mean_grad(self.target, self.zero_fill)
        self.actual_optimizer.update(None, *args, **kwds)


def _as_updated(rule: Any, param: Any) -> Any:
    """Returns the parameter that the rule updates: with ``use_fp32_update`` a float32 copy."""
    if not rule._use_fp32_update or param.dtype != np.float16:
        return param
    return chainer.Parameter(param.array.astype(np.float32))
