"""Uneven inputs: a rank that has run out of them takes part in the updates of the others.

::

    update          1     2     3     4
    rank 0         own   own    -           out of inputs: shadows
    rank 1         own   own   own   own
    mean of        0,1   0,1    1     1     (of two gradients, or of one: as asked for)

Each update of a rank that is active, and each turn of one that has run out, begins with a small
collective, in which the ranks say what they are about to do.
"""
from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import chainer

#: What a rank says: that it has run out, or what it is about to do.
_OUT, _BROADCAST, _EXCHANGE = range(3)
_CODES = {'broadcast': _BROADCAST, 'exchange': _EXCHANGE}
_WORDS = {code: what for what, code in _CODES.items()}
_ENTER = 4  # and above: the options

_communicators: list[Any] = []  # those that are in a join


def join(optimizer: Any, divide_by_initial_world_size: bool = True, enable: bool = True,
         throw_on_early_termination: bool = False) -> AbstractContextManager[None]:
    """Lets ranks train with different numbers of batches.

    Collective: every rank enters and leaves it::

        with chainermn.join(optimizer):
            for x, t in batches_of_this_rank:
                optimizer.update(lossfun, x, t)

    Also around ``trainer.run()``.  A rank whose batches are used up waits at the end of the block
    and takes part in the updates of the others, with gradients of zero; it steps as they do, so
    that model and optimizer stay equal on all ranks.  After the last one has finished, all ranks
    get its model, persistent values included, and the state of its optimizer.  (Of those that
    finish together the one of the highest rank.)  A rank may have no batches at all.

    As ever, the first ``update`` only broadcasts.  With ``n_accumulations``, a rank that ends
    within an accumulation exchanges what it has.

    Only ``optimizer.update`` is shadowed.  As soon as one rank has run out, any other collective
    call on the same communicator, such as those of ``MultiNodeBatchNormalization``, an evaluator, a
    checkpointer or an ``ObservationAggregator``, raises an error on all ranks; calls on another
    communicator would wait forever.  If the block raises on one rank, all ranks raise
    (but with ``CHAINERMN_AGREE=0`` the others wait).

    Args:
        optimizer: Multi-node optimizer, made without double buffering.
        divide_by_initial_world_size: If true, the sum of the gradients is divided by the number of
            all ranks, so that each batch has the same weight.  If false, by the number of ranks
            that are still active, so that steps do not become shorter.
        enable: If false, nothing is done at all, for inputs that are known to be even.
        throw_on_early_termination: If true, all ranks raise a RuntimeError as soon as one has run
            out while others have not.

    Returns:
        A context manager.

    Raises:
        TypeError: If ``optimizer`` is not a multi-node optimizer.
        ValueError: In the context, on all ranks, if a rank calls something that is not shadowed.
        RuntimeError: In the context, on all ranks; see above.
    """
    if not hasattr(optimizer, 'enter_join'):
        raise TypeError('join needs a multi-node optimizer, got '
                        f'{optimizer!r}. Make one with chainermn.create_multi_node_optimizer().')
    if not enable:
        return contextlib.nullcontext()
    return _Join(optimizer, bool(divide_by_initial_world_size), bool(throw_on_early_termination))


class _Join(AbstractContextManager[None]):
    """See :func:`join`.

    The optimizer calls :meth:`announce` before it exchanges something and :meth:`factor` after.
    It has ``enter_join``, to be told of this object; ``flush``, to exchange what it holds back;
    ``layout``, what a rank that shadows has to know of an active one; and ``shadow``.
    """

    def __init__(self, optimizer: Any, divide_by_initial_world_size: bool, throw: bool) -> None:
        self._optimizer = optimizer
        self._comm = optimizer.communicator
        self._divide_by_initial_world_size = divide_by_initial_world_size
        self._throw = throw
        self._active: list[int] = []  # the active ranks of the last turn that had any
        self._termination: Exception | None = None

    def __enter__(self) -> None:
        self._active, self._termination = [], None
        if self._comm in _communicators:
            self._comm.refuse('join', RuntimeError(
                'this communicator is in a join already; leave that one first'))
        self._optimizer.enter_join(self)
        try:
            said = self._comm.agree_to_join(
                _ENTER + 2 * self._divide_by_initial_world_size + self._throw)
            if len(set(said)) > 1:
                raise ValueError(
                    'join refused: its arguments differ between the ranks\n' + '\n'.join(
                        f'  rank {rank}: divide_by_initial_world_size={bool(number & 2)}, '
                        f'throw_on_early_termination={bool(number & 1)}'
                        for rank, number in enumerate(said)))
        except BaseException:
            self._optimizer.enter_join(None)
            raise
        _communicators.append(self._comm)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish()
        except Exception as raised:
            self._tell(raised)
            raise
        else:
            if isinstance(error, Exception):
                self._tell(error)
        finally:
            _communicators.remove(self._comm)
            self._optimizer.enter_join(None)

    def announce(self, what: str) -> None:
        """Begins an update of this rank, which is active.  Collective: with all ranks."""
        self._turn(_CODES[what])

    def factor(self) -> float:
        """By what to multiply means over all ranks."""
        return 1 if self._divide_by_initial_world_size else self._comm.size / len(self._active)

    def _turn(self, said: int) -> tuple[str, Any] | None:
        """Says something; returns what the active ranks do, or None if there are none."""
        numbers = self._comm.agree_to_join(said)
        active = [rank for rank, number in enumerate(numbers) if number != _OUT]
        if not active:
            return None
        self._active = active
        what, layout = _WORDS[numbers[active[0]]], None
        if len(active) < self._comm.size:
            if self._throw:
                self._termination = _early_termination(numbers)
                raise self._termination
            # The others fill what an active rank did not use with zeros themselves.
            if what == 'broadcast' or not self._optimizer.zero_fill:
                layout = self._comm.bcast_obj(self._optimizer.layout(what), root=active[0])
        return what, layout

    def _finish(self) -> None:
        """Shadows the active ranks until there are none."""
        self._optimizer.flush(self._divide_by_initial_world_size)
        while turn := self._turn(_OUT):
            self._optimizer.shadow(*turn)
        if not self._active or self._comm.size == 1:
            return
        root = self._active[-1]
        is_root = self._comm.rank == root
        actual = self._optimizer.actual_optimizer
        parts = {'model': self._optimizer.target, 'optimizer': actual}
        state = self._comm.bcast_obj((
            {name: _saved(part) for name, part in parts.items()},
            dict(_hyperparameters(actual))) if is_root else None, root=root)
        if not is_root:
            for name, part in parts.items():
                # Not strict: what is not initialized has no state of the optimizer.
                chainer.serializers.NpzDeserializer(state[0][name], strict=False).load(part)
            _hyperparameters(actual).update(state[1])
        self._comm.agree_to_join(_OUT)  # a rank that could not load it refuses here

    def _tell(self, error: Exception) -> None:
        """Lets all ranks raise, if they do not do so anyway."""
        links: BaseException | None = error
        while links is not None:
            if links is self._termination:
                return
            numbers = self._comm.said_in_join(links)
            if numbers is not None:
                if self._throw and _OUT in numbers:  # it met another collective
                    raise _early_termination(numbers) from error
                return
            links = links.__cause__ or links.__context__
        with contextlib.suppress(Exception):  # this rank raises its own
            self._comm.refuse('join', error)


def _early_termination(numbers: Any) -> RuntimeError:
    out = [str(rank) for rank, number in enumerate(numbers) if number == _OUT]
    return RuntimeError(f'rank {", ".join(out)} of {len(numbers)} ran out of inputs before the '
                        'others (join was entered with throw_on_early_termination=True)')


def _saved(part: Any) -> dict[str, Any]:
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(part)
    return serializer.target


def _hyperparameters(actual_optimizer: Any) -> dict[str, Any]:
    """The learning rate and the like, which Chainer does not save."""
    return getattr(getattr(actual_optimizer, 'hyperparam', None), '__dict__', {})
