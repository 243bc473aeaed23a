"""The multi-node optimizer: average the gradients of all ranks, then step."""
from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

import chainer
import numpy as np

from chainermn._delegate import Delegate
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers._accumulation import Accumulation
from chainermn.optimizers._progress import Progress
from chainermn.optimizers._replica_check import ReplicaCheck

#: Parameters with their paths, sorted.
Named = list[tuple[str, Any]]


class _MultiNodeOptimizer(Delegate, wraps='actual_optimizer'):
    """See :func:`chainermn.create_multi_node_optimizer`."""

    actual_optimizer: Any
    communicator: CommunicatorBase
    target_params: list[tuple[str, bool]]
    zero_fill: bool
    compression: Any  # a compressor, or None
    joined: Any  # what chainermn.join lets this optimizer announce its exchanges to, or None
    accumulation: Accumulation
    progress: Progress
    replica_check: ReplicaCheck
    _takes_zero_fill: bool

    def __init__(
        self, actual_optimizer: Any, communicator: CommunicatorBase, zero_fill: bool,
        n_accumulations: int = 1, compression: Any = None,
    ) -> None:
        super().__init__(actual_optimizer)
        self.communicator = communicator
        self.target_params = []
        self.zero_fill = zero_fill
        self.compression = compression
        self.joined = None
        self.accumulation = Accumulation(n_accumulations)
        self.progress = Progress()
        self.replica_check = ReplicaCheck()
        self._takes_zero_fill = _takes_zero_fill(communicator)

    def setup(self, link: Any) -> Any:
        """Sets the model to train; see :meth:`chainer.Optimizer.setup`.

        Returns:
            This proxy, so that ``optimizer = create_multi_node_optimizer(...).setup(model)``
            keeps the multi-node optimizer.
        """
        self.actual_optimizer.setup(link)
        self.target_params = []  # another model: the next update broadcasts it
        self.accumulation.clear()
        self.progress.clear()
        if hasattr(self.compression, 'reset'):
            self.compression.reset()
        return self

    def update(self, lossfun: Any = None, *args: Any, **kwds: Any) -> None:
        """Averages the gradients over all ranks and steps.  Collective: every rank calls it.

        Args:
            lossfun: Function of ``args`` and ``kwds`` that returns the loss, a scalar Variable.
                If ``None``, the gradients that the parameters have now are used.

        Raises:
            ValueError: On all ranks, if they are not at the same update: one of them raised an
                error in an earlier update, and the program went on with the next one there.
        """
        self.actual_optimizer._check_set_up()
        self.progress.begin(lossfun is not None)
        span = self.communicator.span
        with span('forward'):
            loss = None if lossfun is None else lossfun(*args, **kwds)
        named = sorted(self.target.namedparams())
        seen = _seen(named)
        is_changed = seen != self.target_params
        if loss is not None:
            with span('backward'):
                self._backward(loss, named, not is_changed and self.accumulation.is_next_last)
            del loss
        if is_changed:
            self.accumulation.clear()
            self._announce('broadcast')
            self._broadcast()
            self.target_params = seen  # not if it failed: another rank may not have got so far
        elif self.accumulation.add(self.target):
            self._announce('exchange')
            self._step(*args, **kwds)
            self.progress.clear()
        self.progress.close()

    def serialize(self, serializer: Any) -> None:
        """Saves or loads the state of the actual optimizer, and what compression has not sent yet.

        The latter belongs to the rank.  A rank that loads what another one saved begins anew.
        """
        if isinstance(serializer, chainer.Deserializer):
            self.progress.clear()
        self.actual_optimizer.serialize(serializer)
        if not hasattr(self.compression, 'serialize'):
            return
        serializer = serializer['compression']
        try:
            rank = serializer('rank', self.communicator.rank)
        except KeyError:  # saved without compression
            rank = None
        if rank == self.communicator.rank:
            self.compression.serialize(serializer)
        else:
            self.compression.reset()

    def is_changed(self, target: Any) -> bool:
        """Whether the parameters of ``target`` are not those of the last call.

        They are the same if there are the same names, and the same of them are initialized.
        """
        before, self.target_params = self.target_params, _seen(sorted(target.namedparams()))
        return self.target_params != before

    def _backward(self, loss: Any, named: Named, is_exchanged: bool) -> None:
        """Computes the gradients of the named parameters, which are exchanged next or not."""
        if getattr(self.actual_optimizer, '_use_cleargrads', True):
            self.target.cleargrads()
        else:
            self.target.zerograds()
        scale = self.actual_optimizer._loss_scale
        loss.backward(loss_scale=scale)
        self._keep_scale(scale)

    def _keep_scale(self, scale: float | None) -> None:
        if scale is not None:
            # The update rule divides by the scale that backward left in the parameter. One that
            # this rank's loss did not use has none, but its mean gradient is scaled all the same.
            for param in self.target.params():
                param._loss_scale = scale

    def _announce(self, what: str) -> None:
        if self.joined is not None:
            self.joined.announce(what)

    def _broadcast(self) -> None:
        with self.communicator.span('broadcast'):
            self.communicator.bcast_data(self.target)
        for param in self.target.params():
            rule = param.update_rule
            if param.is_initialized and rule is not None and rule.enabled and rule.state is None:
                # As the first step would: Chainer loads no snapshot that was taken without them.
                rule._init_states(_as_updated(rule, param))

    def _step(self, *args: Any, **kwds: Any) -> None:
        with self.communicator.span('exchange'), self._at_update():
            self._exchange()
        self.progress.close()
        if self.joined is not None and (factor := self.joined.factor()) != 1:
            params = {id(param): param for param in self.target.params(include_uninit=False)}
            for param in params.values():  # one that is shared only once
                _multiply(param.grad, factor)
        with self.communicator.span('update'):
            self.actual_optimizer.update(None, *args, **kwds)
        self.replica_check.after_update(self.communicator, self.target)

    def _exchange(self) -> None:
        """Replaces the gradients by their means over all ranks."""
        mean_grad = self.communicator.multi_node_mean_grad
        if self._takes_zero_fill:
            mean_grad(self.target, self.zero_fill, **self._compressed())
            return
        if self.zero_fill:
            for param in self.target.params(include_uninit=False):
                if param.grad is None:
                    param.grad = param.xp.zeros_like(param.array)
        mean_grad(self.target, **self._compressed())

    def _at_update(self) -> AbstractContextManager[None]:
        """The ranks compare at which update they are; but in a join they may have more or fewer."""
        if self.joined is not None:
            return contextlib.nullcontext()
        count = self.progress.count
        return self.communicator.at_update(
            self.actual_optimizer.t * self.accumulation.n + count, count)

    def _compressed(self) -> dict[str, Any]:
        # Communicators need not know of compression if there is none.
        return {} if self.compression is None else {'compression': self.compression}

    # --- for chainermn.join -------------------------------------------------------------------

    def enter_join(self, joined: Any) -> None:
        """Lets each exchange be announced to ``joined`` first; ``None`` ends that."""
        self.joined = joined
        self.progress.clear()

    def flush(self, as_if_whole: bool) -> None:
        """Exchanges the mean of what is accumulated, or its share of a whole accumulation."""
        accumulation = self.accumulation
        if accumulation.count:
            accumulation.give(self.target, accumulation.n if as_if_whole else accumulation.count)
            self._announce('exchange')
            self._step()

    def layout(self, what: str) -> dict[str, Any]:
        """What :meth:`shadow` has to know: which parameters are broadcast, or have gradients."""
        return {path: param.shape for path, param in self.target.namedparams(include_uninit=False)
                if what == 'broadcast' or param.grad is not None}

    def shadow(self, what: str, layout: dict[str, Any] | None) -> None:
        """Takes part in the update of another rank, with nothing of its own."""
        self.target.cleargrads()
        params = dict(self.target.namedparams())
        if what == 'broadcast':
            for path, shape in (layout or {}).items():
                if path in params and not params[path].is_initialized:
                    params[path].initialize(shape)
            self._broadcast()
            self.is_changed(self.target)
            return
        for path in layout or {}:
            if path in params and params[path].is_initialized:
                params[path].grad = params[path].xp.zeros_like(params[path].array)
        self._keep_scale(self.actual_optimizer._loss_scale)
        self._step()


def _seen(named: Named) -> list[tuple[str, bool]]:
    return [(name, param.is_initialized) for name, param in named]


def _multiply(grad: Any, factor: float) -> None:
    """Multiplies in place; float16 in float32."""
    if grad is not None:
        wide = np.promote_types(grad.dtype, np.float32)
        with np.errstate(over='ignore', invalid='ignore'):
            grad[...] = grad.astype(wide, copy=False) * wide.type(factor)


def _takes_zero_fill(communicator: CommunicatorBase) -> bool:
    """Whether its multi_node_mean_grad has this parameter; that of a user's class may not."""
    try:
        inspect.signature(communicator.multi_node_mean_grad).bind(None, False)
    except TypeError:
        return False
    return True


def _as_updated(rule: Any, param: Any) -> Any:
    """Returns the parameter that the rule updates: with ``use_fp32_update`` a float32 copy."""
    if not rule._use_fp32_update or param.dtype != np.float16:
        return param
    return chainer.Parameter(param.array.astype(np.float32))
