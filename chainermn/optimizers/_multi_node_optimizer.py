"""The multi-node optimizer: average the gradients of all ranks, then step."""
from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

import chainer
import numpy as np

from chainermn._operations.call_signature import NO_UPDATE, Caller, Update
from chainermn._process import environment
from chainermn._types import (
    Array,
    FunctionNode,
    Model,
    Object,
    Optimizer,
    Serializer,
    Variable,
)
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers import _foreign_optimizer
from chainermn.optimizers._accumulation import Accumulation
from chainermn.optimizers._optimizer_proxy import OptimizerProxy, fill_missing_grad
from chainermn.optimizers._optimizer_settings import Named, OptimizerSettings
from chainermn.optimizers._sharded_states import sharded_update
from chainermn.optimizers._sharded_states.sharded_update import ShardedUpdate, as_updated
from chainermn.optimizers._update_watch import UpdateWatch, watch

if TYPE_CHECKING:
    from chainermn.communicators.compression import Compressor, PowerSGD
    from chainermn.optimizers._join import Join

#: What all ranks do together in an update.
Exchange = Literal['broadcast', 'exchange']

#: Shapes of parameters, by path.
Shapes = dict[str, tuple[int, ...]]

_CHECK_INTERVAL = 100  # updates


class _UpdateProgress:
    """The progress of an optimizer on this rank.  Not in the proxy, where assignment takes longer.

    Attributes:
        n_started: Updates since the last exchange.  The ranks compare it when they exchange
            gradients.  An update that raised an error on one rank counts there, so in the next
            exchange that rank is ahead of the others.
        is_started: Whether other ranks still wait for this rank in the current update.
        n_debugged: Updates in debug mode.
        has_gradients: Whether backward has ever computed a gradient of the model.
    """

    __slots__ = 'has_gradients', 'is_started', 'n_debugged', 'n_started'

    def __init__(self) -> None:
        self.n_debugged, self.has_gradients = 0, False
        self.restart()

    def restart(self) -> None:
        """Start with the first update of a model."""
        self.n_started, self.is_started = 0, False


class MultiNodeOptimizer(OptimizerProxy):
    """See :func:`chainermn.create_multi_node_optimizer`.

    It has all attributes of the actual optimizer, such as ``lr`` and ``t``, and these:

    Attributes:
        actual_optimizer: The optimizer that steps.
        communicator: The communicator whose ranks average gradients.
        zero_fill: Whether gradients that a rank lacks count as zero.
        compression: The compressor of gradients, or ``None``.
        target_params: The path of each parameter, and whether it is initialized.
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
    zero_fill: bool
    compression: Compressor | PowerSGD | None
    _joined: Join | None
    _accumulation: Accumulation
    _sharding: ShardedUpdate | None
    _caller: Caller  # this optimizer, with options that the ranks compare
    _settings: OptimizerSettings
    _progress: _UpdateProgress
    _watch: UpdateWatch
    _span: Callable[[str], AbstractContextManager[object]]  # a part of an update on the timeline
    _takes_zero_fill: bool
    _has_debug_variable: bool  # when the optimizer was created

    if TYPE_CHECKING:  # attributes of the actual optimizer, for editors
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
        n_accumulations: int = 1, compression: Compressor | PowerSGD | None = None,
    ) -> None:
        super().__init__(actual_optimizer)
        self.communicator = communicator
        self.target_params = []
        self.zero_fill = zero_fill
        self.compression = compression
        self._joined = None
        self._accumulation = Accumulation(n_accumulations)
        self._sharding = None
        self._settings = OptimizerSettings(
            actual_optimizer, 'the multi-node optimizer', 'create_multi_node_optimizer')
        self._caller = self._settings.caller
        self._settings.is_compared = False
        self._progress = _UpdateProgress()
        self._watch = watch(actual_optimizer, communicator)
        self._span = (communicator.span if environment.text(environment.TIMELINE)
                      else contextlib.nullcontext)
        self._takes_zero_fill = takes(communicator, False)
        self._has_debug_variable = environment.flag(environment.DEBUG)

    def setup(self, link: Model) -> MultiNodeOptimizer:
        """Set the model to train; see :meth:`chainer.Optimizer.setup`.

        Args:
            link: The model.

        Returns:
            This proxy, so that ``optimizer = create_multi_node_optimizer(...).setup(model)``
            keeps the multi-node optimizer.

        Example:
            >>> sgd = chainer.optimizers.SGD(lr=0.1)
            >>> optimizer = chainermn.create_multi_node_optimizer(sgd, comm).setup(model)
        """
        self.actual_optimizer.setup(link)
        self.target_params = []  # another model: the next update broadcasts it
        self._accumulation.clear()
        if self._sharding is not None:
            self._sharding.clear()
        self._progress = _UpdateProgress()
        if self.compression is not None and hasattr(self.compression, 'reset'):
            self.compression.reset()
        return self

    def update(self, lossfun: Callable[..., Variable] | None = None, *args: Object, **kwds: Object
               ) -> None:
        """Average the gradients over all ranks and step.  Collective: every rank calls it.

        Args:
            lossfun: Function that returns the loss, a scalar Variable.  If ``None``, the current
                gradients of the parameters are used.
            args: Arguments of ``lossfun``.
            kwds: Keyword arguments of ``lossfun``.

        Raises:
            RuntimeError: On all ranks, if the optimizer has no model.
            ValueError: On all ranks, if they are at different updates: one rank raised an error in
                an earlier update, and the program continued with the next update there.

        Example:
            >>> for _ in range(3):
            ...     optimizer.update(model, *batch)
            >>> optimizer.t  # the first update only copied the parameters of rank 0
            2
        """
        self._check_set_up()
        # After an error, an update without a loss function completes the update of that error.
        if lossfun is not None or not self._progress.is_started:
            self._progress.n_started += 1
        self._progress.is_started = True
        accumulation = self._accumulation
        with self._span('forward'):
            loss = None if lossfun is None else self._loss(lossfun, args, kwds)
        named = sorted(self.actual_optimizer.target.namedparams())
        seen = _seen(named)
        is_changed = seen != self.target_params
        if loss is not None:
            with self._span('backward'):
                self._backward(loss, named, not is_changed and accumulation.is_last)
            if not self._progress.has_gradients:
                self._check_model(loss, named)
            del loss
        if self._settings.is_compared and self._joined is None:  # in a join, they can differ
            self._settings.compare(named)
        if is_changed:
            self._announce('broadcast')
            self._broadcast_as_caller()
            self.target_params = seen  # not if it failed: other ranks may not have reached this
        elif accumulation.add(self.target):
            self._announce('exchange')
            self._step(*args, **kwds)
            self._progress.n_started = 0
        self._progress.is_started = False

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the actual optimizer, and the gradients that were not sent yet.

        Those gradients belong to the rank.  If a rank loads a snapshot of another rank, it takes
        that rank's accumulated gradients (``n_accumulations``) for its own, and drops those that
        compression has not sent.

        Args:
            serializer: A Chainer serializer or deserializer.

        Example:
            >>> if comm.rank == 0:
            ...     chainer.serializers.save_npz('optimizer.npz', optimizer)
        """
        if isinstance(serializer, chainer.Deserializer):
            self._progress.restart()
            loaded = sharded_update.load_shard(serializer, self.target)
            if self._sharding is not None:
                self._sharding.begin_loading(self.target, loaded)
            elif loaded:
                raise ValueError(
                    'the snapshot has one shard of the states of the optimizer. Create the '
                    'optimizer with shard_states=True, or load the snapshot with '
                    'chainermn.create_multi_node_checkpointer, which joins the files of all ranks.')
        _foreign_optimizer.serialize(
            self.actual_optimizer, serializer, self.communicator.rank == 0)
        self._accumulation.serialize(serializer, self.target)
        if self._sharding is not None and not isinstance(serializer, chainer.Deserializer):
            self._sharding.serialize(serializer, self.target)
        compression = self.compression
        if compression is None or not hasattr(compression, 'serialize'):
            return
        serializer = serializer['compression']
        try:
            rank = serializer('rank', self.communicator.rank)
        except KeyError:  # saved without compression
            rank = None
        if rank == self.communicator.rank:
            compression.serialize(serializer)
        else:
            compression.reset()  # type: ignore[union-attr]

    def new_epoch(self, auto: bool = False) -> None:
        """Tell the actual optimizer, if it counts them, that an epoch begins.

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
        """Check whether ``target`` has other parameters than in the last call.

        Args:
            target: The model.

        Returns:
            False if the paths are the same, and the same parameters are initialized.

        Example:
            >>> optimizer.is_changed(model), optimizer.is_changed(model)
            (True, False)
        """
        before, self.target_params = self.target_params, _seen(sorted(target.namedparams()))
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
                'the function of update(lossfun, ...) must return the loss, a scalar Variable, not '
                f'{loss!r}.'))
        if isinstance(loss, chainer.Variable) and loss.size != 1 and loss.grad is None:
            self.communicator.refuse('the multi-node optimizer', ValueError(
                f'the loss of update(lossfun, ...) has the shape {loss.shape}; return a scalar, '
                'such as F.mean(loss).'))
        return loss

    def _check_model(self, loss: Variable, named: Named) -> None:
        """Raise ValueError on all ranks if the loss only depends on parameters of another model."""
        self._progress.has_gradients = any(param.grad is not None for _, param in named)
        if not self._progress.has_gradients and _depends_on_parameters(loss):
            self.communicator.refuse('the multi-node optimizer', ValueError(
                'the loss of update(lossfun, ...) depends on no parameter of the '
                f'{type(self.target).__name__} passed to setup(), but on those of another model. '
                'Pass the same model to setup() and update().'))

    def _backward(self, loss: Variable, named: Named, is_exchanged: bool) -> None:
        """Compute the gradients of the named parameters.

        Args:
            loss: The loss.
            named: All parameters of the model.
            is_exchanged: Whether the gradients are exchanged in this update.
        """
        self._compute_gradients(loss)

    def _announce(self, what: Exchange) -> None:
        if self._joined is not None:
            self._joined.announce(what)

    def _broadcast_as_caller(self) -> None:
        with self.communicator.called_by(self._caller):
            self._broadcast()

    def _broadcast(self) -> None:
        with self._span('broadcast'):
            self.communicator.bcast_data(self.actual_optimizer.target)
        if self._sharding is not None:
            self._sharding.prepare(self.actual_optimizer.target)
            return
        for param in self.actual_optimizer.target.params():
            rule = param.update_rule
            if param.is_initialized and rule is not None and rule.enabled and rule.state is None:
                # As in the first step; otherwise Chainer could not load a snapshot taken before.
                rule._init_states(as_updated(rule, param))

    def _step(self, *args: Object, **kwds: Object) -> None:
        with self.communicator.called_by(self._caller, self._current_update()):
            if self._sharding is not None:
                self._sharding.prepare(self.actual_optimizer.target)
            with self._span('exchange'):
                self._exchange()
        self._progress.is_started = False
        if self._joined is not None and (factor := self._joined.factor()) != 1:
            target = self.actual_optimizer.target
            params = {id(param): param for param in target.params(include_uninit=False)}
            for param in params.values():  # once per shared parameter
                _multiply(param.grad, factor)
        self._update_parameters(*args, **kwds)

    def _update_parameters(self, *args: Object, **kwds: Object) -> None:
        """Let the actual optimizer step, with the mean gradients."""
        with self._span('update'):
            if self._sharding is not None:
                self._sharding.update(self.actual_optimizer)
            else:
                self._watch.is_averaged = True
                try:
                    self.actual_optimizer.update(None, *args, **kwds)
                finally:
                    self._watch.is_averaged = False
        self._check_replicas()

    def _exchange(self) -> None:
        """Replace the gradients by their means over all ranks."""
        comm, target = self.communicator, self.actual_optimizer.target
        # A user's communicator need not accept this argument if it is not used.
        options: dict[str, Object] = {} if self.compression is None else {
            'compression': self.compression}
        if not self._takes_zero_fill:
            if self.zero_fill:
                for param in target.params(include_uninit=False):
                    fill_missing_grad(param)
            comm.multi_node_mean_grad(target, **options)
        elif self._sharding is None or self._needs_all_gradients():
            comm.multi_node_mean_grad(target, self.zero_fill, **options)
        else:
            comm._mean_grad_shard(target, self.zero_fill, self._sharding.shard)

    def _needs_all_gradients(self) -> bool:
        """Whether more than the update rules of this rank's shard uses the mean gradients."""
        optimizer = self.actual_optimizer
        hookable = optimizer._hookable
        return bool(
            self.compression is not None or optimizer._loss_scale is not None
            or hookable._pre_update_hooks or hookable._post_update_hooks
            or self._has_debug_variable or chainer.is_debug())

    def _current_update(self) -> Update:
        """Return what the ranks compare; nothing in a join, where the counts may differ."""
        if self._joined is not None:
            return NO_UPDATE
        count = self._progress.n_started
        t = getattr(self.actual_optimizer, 't', 0)  # an optimizer of another framework has none
        return Update(t * self._accumulation.n + count, count)

    def _check_replicas(self) -> None:
        """In debug mode, compare the models of all ranks after every k-th update."""
        if self._has_debug_variable or chainer.is_debug():
            self._progress.n_debugged += 1
            if self._progress.n_debugged % _check_interval() == 0:
                self.communicator.check_replicas(self.actual_optimizer.target)

    # --- for chainermn.join -------------------------------------------------------------------

    def _enter_join(self, joined: Join | None) -> None:
        """Announce each exchange to ``joined`` first.

        Args:
            joined: The join; ``None`` leaves it.
        """
        self._joined = joined
        self._progress.restart()

    @contextlib.contextmanager
    def _comparing_settings(self) -> Iterator[None]:
        """Return a context in which the next operation compares settings, for the last time."""
        if self._settings.is_compared and self.target is not None:
            # At the end of a join, all ranks get t and the states of one.
            self._settings.compare(sorted(self.target.namedparams()), with_t=False)
        try:
            with self.communicator.called_by(self._caller):
                yield
        finally:
            self._settings.forget()

    def _flush(self, as_if_whole: bool) -> None:
        """Exchange accumulated gradients.

        Args:
            as_if_whole: Whether to divide them by ``n_accumulations`` instead of by the number of
                updates so far.
        """
        accumulation = self._accumulation
        if accumulation.count:
            accumulation.give(self.target, accumulation.n if as_if_whole else accumulation.count)
            self._announce('exchange')
            self._step()

    def _layout(self, what: Exchange) -> Shapes:
        """Return the argument for :meth:`_shadow` on other ranks.

        Args:
            what: The next operation of this rank.

        Returns:
            The shapes of the parameters that are broadcast, or that have gradients.
        """
        return {path: param.shape for path, param in self.target.namedparams(include_uninit=False)
                if what == 'broadcast' or param.grad is not None}

    def _shadow(self, what: Exchange, layout: Shapes | None) -> None:
        """Take part in the update of another rank, with gradients of zero.

        Args:
            what: The operation of the other rank.
            layout: The result of :meth:`_layout` there, or ``None`` if it is not needed.
        """
        self.actual_optimizer.target.cleargrads()
        params = dict(self.actual_optimizer.target.namedparams())
        if what == 'broadcast':
            for path, shape in (layout or {}).items():
                if path in params and not params[path].is_initialized:
                    params[path].initialize(shape)
            self._broadcast_as_caller()
            self.is_changed(self.actual_optimizer.target)
            return
        for path in layout or {}:
            if path in params and params[path].is_initialized:
                fill_missing_grad(params[path])
        self._keep_scale()
        self._step()


def _seen(named: Named) -> list[tuple[str, bool]]:
    return [(name, param.is_initialized) for name, param in named]


def _depends_on_parameters(loss: Variable) -> bool:
    """Return whether a parameter of any model needs the gradient of a loss."""
    found, seen = [loss.creator_node], set[FunctionNode | None]()
    while found:
        function = found.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        for node in function.inputs:
            if isinstance(node.get_variable_or_none(), chainer.Parameter) and node.requires_grad:
                return True
            found.append(node.creator_node)
    return False


def _multiply(grad: Array | None, factor: float) -> None:
    """Multiply in place; compute float16 in float32."""
    if grad is not None:
        wide = np.promote_types(grad.dtype, np.float32)
        with np.errstate(over='ignore', invalid='ignore'):
            grad[...] = grad.astype(wide, copy=False) * wide.type(factor)


def takes(communicator: CommunicatorBase, *args: object, **kwds: object) -> bool:
    """Return whether multi_node_mean_grad has these parameters; in a user's class it may not."""
    try:
        inspect.signature(communicator.multi_node_mean_grad).bind(None, *args, **kwds)
    except TypeError:
        return False
    return True


def _check_interval() -> int:
    text = environment.text(environment.DEBUG_EVERY) or str(_CHECK_INTERVAL)
    if not text.isdecimal() or not int(text):
        raise ValueError(f'{environment.DEBUG_EVERY} must be a number of updates, 1 or more, '
                         f'not {text!r}')
    return int(text)
