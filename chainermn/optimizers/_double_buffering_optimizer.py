"""Double buffering: gradients travel while the next ones are computed.

::

    update      1          2           3            4
    compute     g1         g2          g3           g4
    send        -          g2 ......   g3 ......    g4 ......
    step        -          -           mean(g2)     mean(g3)

The model and its copy are the two buffers: after each backward they exchange their gradients, the
new ones travel from the copy, and those that have arrived are in the model, where the actual
optimizer looks for them.
"""
from __future__ import annotations

import copy
from typing import Any

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers._multi_node_optimizer import _MultiNodeOptimizer


class _DoubleBufferingOptimizer(_MultiNodeOptimizer):
    """See :func:`chainermn.create_multi_node_optimizer`."""

    communicated_target: Any  # the copy of the model, None before the first broadcast
    _in_flight: Any  # the request of multi_node_mean_grad_async, None if there is none

    def __init__(
        self, actual_optimizer: Any, communicator: CommunicatorBase, zero_fill: bool,
        compression: Any = None,
    ) -> None:
        super().__init__(actual_optimizer, communicator, zero_fill, compression=compression)
        self.communicated_target = None
        self._in_flight = None

    def setup(self, link: Any) -> Any:
        self.wait()
        self.communicated_target = None
        return super().setup(link)

    def wait(self) -> None:
        """Returns once no gradients travel."""
        request, self._in_flight = self._in_flight, None
        if request is not None:
            request.wait()

    def swap_grad(self, target1_params: Any, target2_params: Any) -> None:
        """Exchanges the gradients of two lists of parameters, pair by pair."""
        for param1, param2 in zip(target1_params, target2_params, strict=True):
            if param1.is_initialized:
                param1.grad, param2.grad = param2.grad, param1.grad
            # the scale by which the gradient must be divided goes with it
            param1._loss_scale, param2._loss_scale = param2._loss_scale, param1._loss_scale

    def serialize(self, serializer: Any) -> None:
        """See the base; what compression has not sent yet is known once nothing travels."""
        if self._in_flight is not None:
            self._in_flight.wait()
        super().serialize(serializer)

    def enter_join(self, joined: Any) -> None:
        """Refused: a rank that runs out cannot shadow gradients that arrive one update later."""
        self.communicator.refuse('join', ValueError(
            'join takes no optimizer with double buffering; make it with double_buffering=False'))

    def _broadcast(self) -> None:
        self.wait()
        super()._broadcast()
        self.communicated_target = copy.deepcopy(self.target)

    def _step(self, *args: Any, **kwds: Any) -> None:
        arrived = self._in_flight is not None
        self.wait()
        self.swap_grad(*([param for _, param in sorted(model.namedparams())]
                         for model in (self.target, self.communicated_target)))
        with self._at_update():
            self._in_flight = self.communicator.multi_node_mean_grad_async(
                self.communicated_target, self.zero_fill, **self._compressed())
        self.progress.close()
        if arrived:
            with self.communicator.span('update'):
                self.actual_optimizer.update(None, *args, **kwds)
        self.replica_check.after_update(self.communicator, self.target)
