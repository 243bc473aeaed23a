"""Double buffering: gradients are exchanged while the next ones are computed.

::

    update      1          2           3            4
    compute     g1         g2          g3           g4
    send        -          g2 ......   g3 ......    g4 ......
    step        -          -           mean(g2)     mean(g3)

The model and its copy are the two buffers.  After each backward they swap their gradients.  Then
the new gradients are exchanged from the copy, and the model has the previous means, for the actual
optimizer.
"""
from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from chainermn._types import Model, Object, Optimizer, Parameter, Serializer
from chainermn.communicators.communicator_base import CommunicatorBase, MeanRequest
from chainermn.optimizers._multi_node_optimizer import Joined, MultiNodeOptimizer

if TYPE_CHECKING:
    from chainermn.communicators.compression import Compressor, PowerSGD


class _DoubleBufferingOptimizer(MultiNodeOptimizer):
    """See :func:`chainermn.create_multi_node_optimizer`."""

    communicated_target: Model  # the copy of the model, None before the first broadcast
    _in_flight: MeanRequest | None

    def __init__(
        self, actual_optimizer: Optimizer, communicator: CommunicatorBase, zero_fill: bool,
        compression: Compressor | PowerSGD | None = None,
    ) -> None:
        super().__init__(actual_optimizer, communicator, zero_fill, compression=compression)
        self.communicated_target = None
        self._in_flight = None

    def setup(self, link: Model) -> MultiNodeOptimizer:
        self._drop()
        self.communicated_target = None
        return super().setup(link)

    def wait(self) -> None:
        """Wait until the gradients in flight are means; the next update steps with them."""
        if self._in_flight is not None:
            self._in_flight.wait()

    def _drop(self) -> bool:
        """Wait for the gradients in flight, and forget them.

        Returns:
            Whether there were any.
        """
        request, self._in_flight = self._in_flight, None  # also if waiting raises an error
        if request is not None:
            request.wait()
        return request is not None

    def swap_grad(self, target1_params: Sequence[Parameter], target2_params: Sequence[Parameter]
                  ) -> None:
        """Swap the gradients of two lists of parameters, pair by pair.

        Args:
            target1_params: Parameters.
            target2_params: As many other parameters.
        """
        for param1, param2 in zip(target1_params, target2_params, strict=True):
            if param1.is_initialized:
                param1.grad, param2.grad = param2.grad, param1.grad
            # the update rule divides the gradient by this scale
            param1._loss_scale, param2._loss_scale = param2._loss_scale, param1._loss_scale

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the optimizer, once no gradients are in flight.

        Args:
            serializer: A Chainer serializer or deserializer.
        """
        self.wait()
        super().serialize(serializer)

    def _enter_join(self, joined: Joined | None) -> NoReturn:
        """Raise ValueError: other ranks cannot shadow gradients that arrive one update later."""
        self.communicator.refuse('join', ValueError(
            'join does not support double buffering. Create the optimizer with '
            'double_buffering=False.'))

    def _broadcast(self) -> None:
        self._drop()
        super()._broadcast()
        self.communicated_target = copy.deepcopy(self.target)

    def _step(self, *args: Object, **kwds: Object) -> None:
        if self._sharding is not None:
            with self.communicator.called_by(self._caller):
                self._sharding.prepare(self.target)
        arrived = self._drop()
        self.swap_grad(*([param for _, param in sorted(model.namedparams())]
                         for model in (self.target, self.communicated_target)))
        with self.communicator.called_by(self._caller, self._current_update()):
            self._in_flight = self.communicator.multi_node_mean_grad_async(
                self.communicated_target, self.zero_fill, **self._compressed())
        self._progress.is_started = False
        if arrived:
            self._update_parameters(*args, **kwds)
        else:
            self._check_replicas()
