"""Double buffering: gradients are averaged while the next gradients are computed.

::

    update      1          2           3            4
    compute     g1         g2          g3           g4
    send        -          g2 ......   g3 ......    g4 ......
    step        -          -           mean(g2)     mean(g3)

The model and its copy are the two buffers. After each backward pass, they swap their gradients.
Then the copy has the new gradients, which are averaged during the next update, and the model has
the previous means, which the actual optimizer uses.
"""
from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

import chainer

from chainermn._gradients import loss_scale
from chainermn._types import Array, Model, Parameter, Serializer
from chainermn.communicators.communicator_base import GradientQueue
from chainermn.optimizers._accumulation import loaded
from chainermn.optimizers._gradient_averaging import GradientAveraging
from chainermn.optimizers._optimizer_proxy import by_first_path
from chainermn.optimizers._sharded_states.partition import Shard


class DoubleBuffering(GradientAveraging):
    """Averages gradients during the next update, which then applies the means.

    Attributes:
        communicated_target: The copy of the model; ``None`` before the first update.
    """

    public = *GradientAveraging.public, 'communicated_target', 'swap_grad', 'wait'

    communicated_target: Model = None
    _queue: GradientQueue  # created in the first update
    _means: Mapping[str, Array] = MappingProxyType({})  # of the gradients in flight, by path
    #: Means loaded from a snapshot, by path, until an update uses them.
    _loaded: Mapping[str, Array] = MappingProxyType({})
    _loaded_scale: float | None = None  # their loss scale
    _has_sent = False  # whether the next update applies means

    def begin(self) -> None:
        """Begin an update while the gradients of the last one are in flight."""

    def skip(self) -> None:
        """Do nothing, because the gradients of the current update are already in flight."""

    def reset(self) -> None:
        self._finish_in_flight()
        self._loaded = {}
        self.communicated_target = None
        super().reset()

    def wait(self) -> None:
        """Wait until the gradients in flight are averaged. The next update applies them."""
        means, self._means = self._means, {}  # cleared even if waiting raises an error
        if means:
            self._queue.wait()
            params = dict(self.communicated_target.namedparams())
            for path, mean in means.items():
                params[path].grad = mean
            self._queue.check(self.communicated_target)

    def swap_grad(self, target1_params: Sequence[Parameter], target2_params: Sequence[Parameter]
                  ) -> None:
        """Swap the gradients of two lists of parameters, pair by pair.

        Args:
            target1_params: Parameters.
            target2_params: The same number of other parameters.
        """
        for param1, param2 in zip(target1_params, target2_params, strict=True):
            if param1.is_initialized:
                param1.grad, param2.grad = param2.grad, param1.grad
            # the update rule divides the gradient by this scale
            param1._loss_scale, param2._loss_scale = param2._loss_scale, param1._loss_scale

    def broadcast(self) -> None:
        self._loaded = {}
        self._finish_in_flight()
        super().broadcast()
        self._create_buffer()

    def _create_buffer(self) -> None:
        """Copy the model. Collective: every rank calls it."""
        self.communicated_target = copy.deepcopy(self.actual_optimizer.target)
        # Every rank calls this: create the queue, or drop gradients left by another optimizer.
        self._queue = self.communicator.mean_queue()
        self._queue.cancel()

    def mean(self, shards: Sequence[Shard] | None) -> bool:
        self._restore()
        has_means = self._finish_in_flight()
        self.swap_grad(*([*by_first_path(sorted(model.namedparams())).values()]
                         for model in (self.actual_optimizer.target, self.communicated_target)))
        gradients, _ = self._queue.gradients(
            self.communicated_target, self.zero_fill, self.compression, False)
        if gradients:
            means = self._queue.submit(gradients, self.compression, loss_scale.unify(
                self.communicated_target.params()))
            self._means = dict(zip(gradients, means, strict=True))
        self._has_sent = True
        return has_means

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the means of the next step. No gradients may be in flight."""
        super().serialize(serializer)
        is_loading = isinstance(serializer, chainer.Deserializer)
        if is_loading or self._has_sent:
            self._serialize_means(serializer['chainermn']['double_buffering'], is_loading)

    def _serialize_means(self, serializer: Serializer, is_loading: bool) -> None:
        """Save or load the mean gradients and their loss scale, which may have changed since."""
        means = serializer['means']
        if is_loading:
            self._loaded_scale = float(loaded(serializer, 'loss_scale', 0.)) or None
            self._loaded = {path: mean for path in _by_path(self.actual_optimizer.target)
                            if (mean := loaded(means, path, None)) is not None}
            self._has_sent = bool(self._loaded)
            return
        if not self._loaded:
            params = {path: param for path, param in _by_path(self.communicated_target).items()
                      if param.is_initialized and param.grad is not None}
            self._loaded_scale = next((param._loss_scale for param in params.values()), None)
        serializer('loss_scale', self._loaded_scale or 0.)
        for path, mean in (self._loaded or {
                path: param.grad for path, param in params.items()}).items():
            means(path, mean)

    def _restore(self) -> None:
        """Put the loaded means into the copy of the model. Collective: every rank calls it."""
        if self.communicated_target is None:  # a resumed run does not broadcast
            self._create_buffer()
        params = _by_path(self.communicated_target) if self._loaded else {}
        for path, param in params.items():
            if param.is_initialized:
                mean = self._loaded.get(path)
                param.grad = None if mean is None else param.device.send(mean)
                param._loss_scale = self._loaded_scale
        self._loaded = {}

    def check_join(self) -> NoReturn:
        """Raise ValueError: join cannot shadow gradients that arrive one update later."""
        self.communicator.refuse('join', ValueError(
            'join does not support double buffering. Create the optimizer with '
            'double_buffering=False.'))

    def _finish_in_flight(self) -> bool:
        """Wait for the gradients in flight. Afterwards, none are in flight.

        Returns:
            Whether gradients were in flight.
        """
        has_sent, self._has_sent = self._has_sent, False
        self.wait()
        return has_sent


def _by_path(model: Model) -> dict[str, Parameter]:
    """Return the parameters, including uninitialized ones, by the names they are saved under."""
    return {path.strip('/'): param
            for path, param in by_first_path(sorted(model.namedparams())).items()}
