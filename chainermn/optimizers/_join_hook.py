"""Shadowing the updates of other ranks, on a rank that has exhausted its batches in a join."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import chainer

from chainermn._types import Model, Object, Optimizer
from chainermn.optimizers._multi_node_optimizer import MultiNodeOptimizer, UpdateProgress
from chainermn.optimizers._optimizer_proxy import fill_missing_grad, keep_scale
from chainermn.optimizers._participants import AllRanks, Operation

#: Shapes of parameters, by path.
Shapes = dict[str, tuple[int, ...]]


class JoinHook:
    """The actions of a join on an optimizer. The method names are PyTorch's.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: MultiNodeOptimizer) -> None:
        self._optimizer = optimizer

    def enter(self, participants: AllRanks) -> None:
        """Make the optimizer run its next updates with these participants."""
        self._optimizer._averaging.check_join()
        self._optimizer._participants = participants
        self._optimizer._progress = UpdateProgress()

    @contextlib.contextmanager
    def comparing_settings(self) -> Iterator[None]:
        """Return a context in which the next operation compares settings for the last time."""
        settings = self._optimizer._settings
        if settings.is_compared and (target := self._optimizer.target) is not None:
            # At the end of a join, all ranks get t and the states of one rank.
            settings.compare(sorted(target.namedparams()), with_t=False)
        try:
            with self._optimizer.communicator.called_by(settings.caller):
                yield
        finally:
            settings.forget()

    def flush(self, as_if_whole: bool) -> None:
        """Average accumulated gradients before their accumulation is complete.

        Args:
            as_if_whole: Whether to divide the gradients by ``n_accumulations`` instead of by the
                number of updates so far.
        """
        optimizer, accumulation = self._optimizer, self._optimizer._accumulation
        optimizer._averaging.begin()
        if count := accumulation.count:
            keep_scale(optimizer.actual_optimizer)
            accumulation.give(optimizer.target, accumulation.n if as_if_whole else count)
            optimizer._participants.announce('average')
            with self._recording(accumulation.n - count):
                optimizer._step()

    def layout(self, operation: Operation) -> Shapes | None:
        """Return the layout for :meth:`main_hook` on other ranks; ``None`` if they need none.

        Args:
            operation: The next operation of this rank.

        Returns:
            The shapes of the parameters that are broadcast, or that have gradients.
        """
        if operation == 'average' and self._optimizer.zero_fill:
            return None  # all gradients are averaged
        params = self._optimizer.target.namedparams(include_uninit=False)
        return {path: param.shape for path, param in params
                if operation == 'broadcast' or param.grad is not None}

    def main_hook(self, operation: Operation, layout: Shapes | None) -> None:
        """Take part in the update of another rank, with gradients of zero.

        Args:
            operation: The operation of the other rank.
            layout: The result of :meth:`layout` on that rank; ``None`` if it is not needed.
        """
        optimizer, target = self._optimizer, self._optimizer.target
        optimizer._averaging.begin()
        target.cleargrads()
        params = dict(target.namedparams())
        if operation == 'broadcast':
            for path, shape in (layout or {}).items():
                if path in params and not params[path].is_initialized:
                    params[path].initialize(shape)
            with self._recording(1):
                optimizer._broadcast()
                if optimizer._recording is not None:
                    optimizer._recording.record_copy()
            optimizer.is_changed(target)
            return
        for path in layout or {}:
            if path in params and params[path].is_initialized:
                fill_missing_grad(params[path])
        keep_scale(optimizer.actual_optimizer)
        with self._recording(optimizer._accumulation.n):
            optimizer._step()

    @contextlib.contextmanager
    def _recording(self, count: int) -> Iterator[None]:
        """Record an update as the last of ``count`` updates, as other ranks accumulate them."""
        optimizer, recording = self._optimizer, self._optimizer._recording
        if recording is None:
            yield
            return
        params = [param for _, param in sorted(optimizer.target.namedparams())]
        for _ in range(count - 1):
            recording.begin_without_batch(optimizer, params)
            recording.end(optimizer)
        recording.begin_without_batch(optimizer, params)
        yield
        recording.end(optimizer)

    def post_hook(self, root: int) -> None:
        """Copy the model and the optimizer state of a rank. Collective: every rank calls it.

        Args:
            root: The rank that finished last.
        """
        comm, actual = self._optimizer.communicator, self._optimizer.actual_optimizer
        parts = {name: part for name, part in (
            ('model', actual.target), ('optimizer', actual)) if hasattr(part, 'serialize')}
        is_root = comm.rank == root
        saved = {name: _saved(part) for name, part in parts.items()} if is_root else {}
        if 'optimizer' in saved:
            saved['optimizer'] = self._optimizer._stepper.common(saved['optimizer'])
        with comm.called_by('join'):
            state = comm.bcast_obj((saved, dict(_hyperparameters(actual))) if is_root else None,
                                   root=root)
        if not is_root:
            for name, part in parts.items():
                # Allow missing keys: uninitialized parameters have no state in the optimizer.
                chainer.serializers.NpzDeserializer(state[0][name], strict=False).load(part)
            _hyperparameters(actual).update(state[1])


def _saved(part: Model | Optimizer) -> dict[str, Object]:
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(part)
    return serializer.target


def _hyperparameters(actual_optimizer: Optimizer) -> dict[str, Object]:
    """Return the hyperparameters, such as the learning rate, which Chainer does not save."""
    return getattr(getattr(actual_optimizer, 'hyperparam', None), '__dict__', {})
