"""The multi-node optimizer, which averages the gradients of all ranks and then steps.

An update is composed of the following objects, each of which has its own state:

- :class:`~._gradient_averaging.GradientAveraging`: how gradients are averaged (all at once,
  overlapped, or with double buffering)
- :class:`~._accumulation.Accumulation`: how often gradients are averaged
- :class:`~._participants.AllRanks`: over which ranks (all, or the active ranks in a join)
- :class:`~._full_update.FullUpdate`: how the actual optimizer steps (in full or sharded)
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import chainer

from chainermn._gradients import loss_scale
from chainermn._operations.call_signature import NO_UPDATE, Update
from chainermn._types import Model, Object, Optimizer, Serializer, Variable
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers._accumulation import Accumulation, loaded
from chainermn.optimizers._full_update import FullUpdate
from chainermn.optimizers._gradient_averaging import GradientAveraging
from chainermn.optimizers._model_checks import ModelChecks
from chainermn.optimizers._optimizer_proxy import OptimizerProxy
from chainermn.optimizers._optimizer_settings import Named, OptimizerSettings
from chainermn.optimizers._participants import AllRanks
from chainermn.optimizers._update_watch import UpdateWatch, watch

if TYPE_CHECKING:
    from chainermn._records.run_record import Recording
    from chainermn.communicators.compression import Compressor, PowerSGD


class UpdateProgress:
    """The progress of an optimizer on this rank.

    Attributes:
        n_started: Number of updates since gradients were last averaged. The ranks compare it when
            they average gradients. A failed update is still counted on the rank that raised the
            error, so that rank is then ahead of the others.
        is_started: Whether other ranks still wait for this rank in the current update.
        n_before: Number of updates before gradients were last averaged, including the updates of a
            loaded snapshot, for error messages. Negative before the first update.
    """

    n_started = 0
    is_started = False
    n_before = -1


class MultiNodeOptimizer(OptimizerProxy):
    """Averages gradients, then calls the actual optimizer.

    Create one with :func:`chainermn.create_multi_node_optimizer`. It has all attributes of the
    actual optimizer, such as ``lr`` and ``t``, and the following ones.

    Attributes:
        actual_optimizer: The optimizer that changes the parameters.
        communicator: The communicator whose ranks average gradients.
        zero_fill: Whether missing gradients of a rank count as zero.
        compression: The compressor of gradients, or ``None``.
        target_params: The path of each parameter and whether it is initialized.
        buckets: With ``overlap=True``, the paths of the parameters in each bucket.
        n_early: With ``overlap=True``, how many buckets the last update sent during the backward
            pass.

    Example:
        >>> optimizer.lr *= 0.5  # an attribute of the actual optimizer
        >>> optimizer.actual_optimizer.lr
        0.05
    """

    communicator: CommunicatorBase
    target_params: list[tuple[str, bool]]  # path, and whether it is initialized
    _is_new: bool  # loaded from a snapshot that was saved before the first broadcast
    _averaging: GradientAveraging
    _accumulation: Accumulation
    _participants: AllRanks
    _stepper: FullUpdate
    _settings: OptimizerSettings  # includes the options that the ranks compare
    _progress: UpdateProgress
    _checks: ModelChecks
    _watch: UpdateWatch
    _answer_requests: Callable[[], None] | None  # only if there is a single rank
    _recording: Recording | None = None

    if TYPE_CHECKING:  # attributes of the averaging and of the actual optimizer, for editors
        zero_fill: bool
        compression: Compressor | PowerSGD | None
        buckets: list[list[str]]
        n_early: int
        target: Model
        t: int  # number of steps
        epoch: int
        lr: float

        def add_hook(self, hook: Callable[[Optimizer], object], name: str | None = None,
                     timing: str = 'auto') -> None: ...
        def remove_hook(self, name: str) -> None: ...
        def call_hooks(self, timing: str = 'pre') -> None: ...
        def loss_scaling(self, interval: int = 1000, scale: float | None = None) -> None: ...
        def set_loss_scale(self, loss_scale: float) -> None: ...
        def use_cleargrads(self, use: bool = True) -> None: ...
        def use_fp32_update(self, flag: bool = True) -> None: ...

    def __init__(
        self, actual_optimizer: Optimizer, communicator: CommunicatorBase, zero_fill: bool,
        averaging: GradientAveraging | None = None, accumulation: Accumulation | None = None,
        stepper: FullUpdate | None = None, settings: OptimizerSettings | None = None,
    ) -> None:
        super().__init__(actual_optimizer)
        self._averaging = averaging or GradientAveraging(
            actual_optimizer, communicator, zero_fill)
        self._accumulation = accumulation or Accumulation(1)
        self._participants = AllRanks()
        self._stepper = stepper or FullUpdate()
        self._settings = settings or OptimizerSettings(
            actual_optimizer, 'the multi-node optimizer', 'create_multi_node_optimizer',
            is_compared=False)
        self.communicator = communicator
        self.target_params, self._is_new = [], False
        self._progress = UpdateProgress()
        self._checks = ModelChecks(communicator)
        self._watch = watch(actual_optimizer, communicator)
        self._answer_requests = (communicator._chainermn_channel.answer_requests
                                 if communicator.size == 1 else None)

    def _holder(self, name: str) -> Object:
        return self._averaging if name in self._averaging.public else self.actual_optimizer

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._averaging.public})

    def setup(self, link: Model) -> MultiNodeOptimizer:
        """Set the model to train. See :meth:`chainer.Optimizer.setup`.

        Args:
            link: The model.

        Returns:
            This proxy, so that ``create_multi_node_optimizer(...).setup(model)`` returns the
            multi-node optimizer.

        Example:
            >>> sgd = chainer.optimizers.SGD(lr=0.1)
            >>> optimizer = chainermn.create_multi_node_optimizer(sgd, comm).setup(model)
        """
        if isinstance(self.actual_optimizer, chainer.Optimizer) and not isinstance(
                link, chainer.Link):
            raise TypeError(
                'optimizer.setup(model) expects a chainer.Link, not '
                f'{getattr(link, "__name__", type(link).__name__)}. Pass loss functions, such as a '
                'Pipeline, to optimizer.update instead.')
        self._averaging.reset()
        self.actual_optimizer.setup(link)
        self.target_params, self._is_new = [], False  # the next update broadcasts the model
        self._accumulation.clear()
        self._stepper.clear()
        self._progress = UpdateProgress()
        self._checks = ModelChecks(self.communicator)
        return self

    def update(self, lossfun: Callable[..., Variable] | None = None, *args: Object, **kwds: Object
               ) -> None:
        """Average the gradients over all ranks and step. Collective: every rank calls it.

        Args:
            lossfun: Function that returns the loss, a scalar Variable. If ``None``, the current
                gradients of the parameters are used.
            args: Arguments of ``lossfun``.
            kwds: Keyword arguments of ``lossfun``.

        Raises:
            RuntimeError: On all ranks, if the optimizer has no model.
            ValueError: On all ranks, if they are at different updates, because one rank raised an
                error in an earlier update and the script on that rank went on to the next update.

        Example:
            >>> for _ in range(3):
            ...     optimizer.update(model, *batch)
            >>> optimizer.t  # the first update only copied the parameters of rank 0
            2
        """
        self._begin(lossfun is not None)
        recording = self._recording
        if recording is not None:
            lossfun = recording.begin(self, lossfun, args, kwds)
        with self.communicator.span('forward'):
            loss = None if lossfun is None else self._loss(lossfun, args, kwds)
        target, accumulation = self.actual_optimizer.target, self._accumulation
        named = sorted(target.namedparams())
        seen = _seen(named)
        is_changed = seen != self.target_params
        if loss is not None:
            with self.communicator.span('backward'):
                self._averaging.backward(loss, named, accumulation.completed
                                        if accumulation.is_last and not is_changed else None)
            if not self._checks.has_gradients:
                self._checks.after_backward(loss, target)
            del loss
        elif (scale := getattr(self.actual_optimizer, '_loss_scale', None)) is not None:
            loss_scale.unify(target.params(), scale)
        if recording is not None:
            recording.record_gradients(self, [param for _, param in named],
                                    'buckets' in self._averaging.public)
        if self._settings.is_compared and self._participants.are_in_lockstep:
            self._settings.compare(named)
        if is_changed:
            self._participants.announce('broadcast')
            self._broadcast()
            if recording is not None:
                recording.record_copy()
            self.target_params = seen  # not after an error: other ranks may not get here
        elif accumulation.add(target):
            self._participants.announce('average')
            self._step(*args, **kwds)
        self._progress.is_started = False
        if recording is not None:
            recording.end(self)

    def gather_states(self) -> dict[str, dict[str, Object]]:
        """Gather the states of the update rules, which may be sharded across the ranks.

        Collective: every rank calls it.

        Returns:
            On all ranks, a dict from parameter path to state, for all initialized parameters with
            an update rule. A state maps names to arrays with the parameter's shape and device. The
            arrays may be the optimizer's own arrays, not copies.

        Example:
            >>> adam = chainer.optimizers.Adam()
            >>> optimizer = chainermn.create_multi_node_optimizer(
            ...     adam, comm, shard_states=True).setup(model)
            >>> for _ in range(2):
            ...     optimizer.update(model, *batch)
            >>> sorted(optimizer.gather_states()['/predictor/b'])
            ['m', 'v']
        """
        self._averaging.wait()
        return self._stepper.gather(self.actual_optimizer)

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the actual optimizer and the gradients that were not sent yet.

        These gradients belong to one rank. If a rank loads a snapshot of another rank, it uses that
        rank's accumulated gradients (``n_accumulations``) as its own and drops the residuals of
        compression.

        Args:
            serializer: A Chainer serializer or deserializer.

        Example:
            >>> if comm.rank == 0:
            ...     chainer.serializers.save_npz('optimizer.npz', optimizer)
        """
        self._averaging.wait()
        if isinstance(serializer, chainer.Deserializer):
            self._progress = UpdateProgress()
            self._is_new = bool(loaded(serializer['chainermn'], 'is_new', False))
        elif not self.target_params:
            serializer['chainermn']('is_new', True)
        self._stepper.serialize(self.actual_optimizer, serializer, self.communicator.rank == 0)
        self._accumulation.serialize(serializer, self.target)
        self._averaging.serialize(serializer)

    def new_epoch(self, auto: bool = False) -> None:
        """Tell the actual optimizer that an epoch begins, if it counts epochs.

        Args:
            auto: See :meth:`chainer.Optimizer.new_epoch`.

        Example:
            >>> before = optimizer.epoch
            >>> optimizer.new_epoch(auto=True)  # as Chainer's updaters do
            >>> optimizer.epoch - before
            1
        """
        if hasattr(self.actual_optimizer, 'new_epoch'):
            self.actual_optimizer.new_epoch(auto)

    def is_changed(self, target: Model) -> bool:
        """Check whether the parameters of ``target`` have changed since the last call.

        Args:
            target: The model.

        Returns:
            False if the paths are the same and the same parameters are initialized.

        Example:
            >>> optimizer.is_changed(model), optimizer.is_changed(model)
            (True, False)
        """
        before = self.target_params
        # In a snapshot from before the first broadcast, the parameters differ between ranks.
        self.target_params = [] if self._is_new else _seen(sorted(target.namedparams()))
        return self.target_params != before

    def _check_set_up(self) -> None:
        """Raise RuntimeError on all ranks if the optimizer has no model."""
        actual = self.actual_optimizer
        if getattr(actual, 'target', None) is None:
            self.communicator.refuse('the multi-node optimizer', RuntimeError(
                'the multi-node optimizer has no model. Call optimizer.setup(model) first' + (
                    '.' if hasattr(actual, 'target') else
                    f'; {type(actual).__name__}.setup must set the attribute target.')))

    def _loss(self, lossfun: Callable[..., Variable], args: tuple[Object, ...],
              kwds: dict[str, Object]) -> Variable:
        if not callable(lossfun):
            self.communicator.refuse('the multi-node optimizer', TypeError(
                f'update(lossfun, ...) takes a function that returns the loss, not a '
                f'{type(lossfun).__name__}. For a loss that you have computed, call '
                'model.cleargrads(), loss.backward() and optimizer.update().'))
        loss = lossfun(*args, **kwds)
        if not hasattr(loss, 'backward'):
            self.communicator.refuse('the multi-node optimizer', TypeError(
                'the function passed to update(lossfun, ...) must return the loss, a scalar '
                f'Variable, not {loss!r}.'))
        return loss

    def _begin(self, has_loss: bool) -> None:
        """Begin an update."""
        self._check_set_up()
        if self._progress.n_before < 0:
            # Optimizers of other frameworks have no t.
            self._progress.n_before = getattr(
                self.actual_optimizer, 't', 0) * self._accumulation.n
        # After an error, an update without a loss function completes the failed update.
        if has_loss or not self._progress.is_started:
            self._progress.n_started += 1
        self._progress.is_started = True
        if self._answer_requests is not None:
            self._answer_requests()
        self._averaging.begin()

    def _broadcast(self) -> None:
        """Copy the parameters of rank 0 to all ranks instead of taking a step."""
        with self.communicator.called_by(self._settings.caller):
            with self.communicator.span('broadcast'):
                self._averaging.broadcast()
            self._is_new = False
            self._stepper.begin(self.actual_optimizer)

    def _step(self, *args: Object, **kwds: Object) -> None:
        """Average the gradients and step with the means."""
        target = self.actual_optimizer.target
        with self.communicator.called_by(self._settings.caller, self._current_update()):
            self._stepper.prepare(self.actual_optimizer)
            with self.communicator.span('exchange'):
                has_means = self._averaging.mean(self._stepper.shards())
        self._progress.is_started = False
        self._participants.scale(target)
        if has_means:
            if self._recording is not None:
                self._recording.record_means(self, self._stepper.shards() is None)
            with self.communicator.span('update'):
                self._watch.is_averaged = True
                try:
                    self._stepper.update(self.actual_optimizer, *args, **kwds)
                finally:
                    self._watch.is_averaged = False
            if getattr(self.actual_optimizer, '_loss_scaling_isnan', False):
                self._averaging.skip()
        self._checks.after_update(target)
        self._progress.n_before += self._progress.n_started
        self._progress.n_started = 0

    def _current_update(self) -> Update:
        """Return the counts that the ranks compare, except in a join, where they may differ."""
        if not self._participants.are_in_lockstep:
            return NO_UPDATE
        count = self._progress.n_started
        return Update(self._progress.n_before + count, count)


def _seen(named: Named) -> list[tuple[str, bool]]:
    return [(name, param.is_initialized) for name, param in named]
