"""Uneven inputs: a rank that has exhausted its inputs takes part in the updates of the others.

::

    update          1     2     3     4
    rank 0         own   own    -           exhausted: shadows
    rank 1         own   own   own   own
    mean of        0,1   0,1    1     1     (the sum divided by 2 or by 1, as configured)

Each update of an active rank and each turn of an exhausted rank start with a small collective in
which the ranks tell each other their next operation.
"""
from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np

from chainermn._operations import common_error
from chainermn._operations.on_all_ranks import check_equal
from chainermn._operations.table import ENTER_JOIN
from chainermn._process import runtime
from chainermn._types import Array, Model
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers._join_hook import JoinHook, Shapes
from chainermn.optimizers._multi_node_optimizer import MultiNodeOptimizer
from chainermn.optimizers._participants import AllRanks, Operation

#: The numbers that ranks send to each other: exhausted, or the next operation.
_EXHAUSTED, _BROADCAST, _AVERAGE = range(3)
_CODES: dict[Operation, int] = {'broadcast': _BROADCAST, 'average': _AVERAGE}
_OPERATIONS = {code: operation for operation, code in _CODES.items()}


class _Joins(runtime.ProcessState):
    def __init__(self) -> None:
        self.communicators: list[CommunicatorBase] = []  # communicators that are in a join


def join(optimizer: MultiNodeOptimizer, divide_by_initial_world_size: bool = True,
         enable: bool = True, throw_on_early_termination: bool = False
         ) -> AbstractContextManager[None]:
    """Return a context in which ranks can train with different numbers of batches.

    Collective: every rank enters and leaves the context. It can also wrap ``trainer.run()``. A rank
    that has exhausted its batches waits at the end of the block and takes part in the updates of
    the others with gradients of zero. It also applies these updates to its own model, so that the
    model and the optimizer stay identical on all ranks. When the last rank has finished, all ranks
    get its model, including persistent values, and the state of its optimizer. (If several ranks
    finish last, the one with the highest rank number is used.) A rank may have no batches at all.

    As usual, the first ``update`` only copies parameters. With ``n_accumulations``, a rank that
    finishes within an accumulation still contributes its accumulated gradients.

    Only ``optimizer.update`` is shadowed. Once a rank is exhausted, any other collective call on
    the same communicator, such as in ``MultiNodeBatchNormalization``, an evaluator, a checkpointer
    or an ``ObservationAggregator``, raises an error on all ranks. Calls on another communicator
    would wait forever. If the block raises an error on one rank, all ranks raise it.

    Args:
        optimizer: Multi-node optimizer, created without double buffering.
        divide_by_initial_world_size: If true, the sum of the gradients is divided by the number of
            all ranks, so that each batch has the same weight. If false, the sum is divided by the
            number of active ranks, so that steps do not become smaller.
        enable: If false, the context does nothing, for inputs that are known to be even.
        throw_on_early_termination: If true, all ranks raise RuntimeError when one rank is exhausted
            and others are not.

    Returns:
        A context manager.

    Raises:
        TypeError: If ``optimizer`` is not a multi-node optimizer.
        ValueError: In the context, on all ranks, if a rank calls an operation that is not shadowed,
            or if the arguments differ between ranks.
        RuntimeError: In the context, on all ranks, if a rank is exhausted early and
            ``throw_on_early_termination`` is true, or if the communicator is already in a join.

    Example:
        >>> n_batches = 2 + comm.rank
        >>> with chainermn.join(optimizer):
        ...     for _ in range(n_batches):
        ...         optimizer.update(model, *batch)
        >>> optimizer.t  # of 3 updates, the first only copied the parameters
        2
    """
    if not hasattr(optimizer, '_participants'):
        raise TypeError('join needs a multi-node optimizer, not '
                        f'{getattr(optimizer, "__name__", type(optimizer).__name__)}. '
                        'Create one with chainermn.create_multi_node_optimizer().')
    if not enable:
        return contextlib.nullcontext()
    return Join(optimizer.communicator, JoinHook(optimizer), bool(divide_by_initial_world_size),
                bool(throw_on_early_termination))


class Join(AllRanks, AbstractContextManager[None]):
    """See :func:`join`."""

    are_in_lockstep = False

    def __init__(self, communicator: CommunicatorBase, hook: JoinHook,
                 divide_by_initial_world_size: bool, throw: bool) -> None:
        self._comm = communicator
        self._hook = hook
        self._divide_by_initial_world_size = divide_by_initial_world_size
        self._throw = throw
        self._active: list[int] = []  # the active ranks in the last turn that had any
        self._termination: Exception | None = None

    def __enter__(self) -> None:
        self._active, self._termination = [], None
        if self._comm in runtime.get(_Joins).communicators:
            self._comm.refuse('join', RuntimeError(
                'this communicator is already in a join. Leave that context first.'))
        self._hook.enter(self)
        try:
            with self._hook.comparing_settings():
                numbers = self._comm._chainermn_channel.join_turn(
                    ENTER_JOIN + 2 * self._divide_by_initial_world_size + self._throw)
            check_equal(self._comm, [
                {'divide_by_initial_world_size': bool(number & 2),
                 'throw_on_early_termination': bool(number & 1)} for number in numbers],
                'join: the arguments differ between ranks', 'Pass the same arguments on all ranks.')
        except BaseException:
            self._hook.enter(AllRanks())
            raise
        runtime.get(_Joins).communicators.append(self._comm)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish()
        except Exception as raised:
            self._raise_on_all_ranks(raised)
            raise
        else:
            if isinstance(error, Exception):
                self._raise_on_all_ranks(error)
        finally:
            runtime.get(_Joins).communicators.remove(self._comm)
            self._hook.enter(AllRanks())

    def announce(self, operation: Operation) -> None:
        self._turn(_CODES[operation])

    def scale(self, model: Model) -> None:
        if not self._divide_by_initial_world_size and len(self._active) < self._comm.size:
            factor = self._comm.size / len(self._active)
            params = {id(param): param for param in model.params(include_uninit=False)}
            for param in params.values():  # once per shared parameter
                _multiply(param.grad, factor)

    def _turn(self, number: int) -> tuple[Operation, Shapes | None] | None:
        """Send a number to all ranks. Return the operation of the active ranks, if any."""
        numbers = self._comm._chainermn_channel.join_turn(number)
        active = [rank for rank, number in enumerate(numbers) if number != _EXHAUSTED]
        if not active:
            return None
        self._active = active
        operation = _OPERATIONS[numbers[active[0]]]
        layout = None
        if len(active) < self._comm.size:
            if self._throw:
                self._termination = _early_termination(numbers)
                raise self._termination
            layout = self._hook.layout(operation)
            if layout is not None:
                with self._comm.called_by('join'):
                    layout = self._comm.bcast_obj(layout, root=active[0])
        return operation, layout

    def _finish(self) -> None:
        """Shadow the active ranks until there are none."""
        self._hook.flush(self._divide_by_initial_world_size)
        while turn := self._turn(_EXHAUSTED):
            self._hook.main_hook(*turn)
        if self._active and self._comm.size > 1:
            self._hook.post_hook(self._active[-1])
            # This raises an error on all ranks if one rank could not load the state.
            self._comm._chainermn_channel.join_turn(_EXHAUSTED)

    def _raise_on_all_ranks(self, error: Exception) -> None:
        """Raise the error on all ranks, unless they have raised it already."""
        for each in common_error.chain(error):
            if each is self._termination:
                return
            numbers = self._comm._chainermn_channel.join_responses(each)
            if numbers is not None:
                if self._throw and _EXHAUSTED in numbers:  # this rank called another collective
                    raise _early_termination(numbers) from error
                return
        with contextlib.suppress(Exception):  # this rank raises the original error
            self._comm.refuse('join', error)


def _early_termination(numbers: Sequence[int | None]) -> RuntimeError:
    exhausted = [str(rank) for rank, number in enumerate(numbers) if number == _EXHAUSTED]
    many = len(exhausted) > 1
    return RuntimeError(f'rank{"s" * many} {", ".join(exhausted)} of {len(numbers)} exhausted '
                        f'{"their" if many else "its"} inputs before the others. Give all ranks '
                        'the same number of inputs, or use throw_on_early_termination=False.')


def _multiply(grad: Array | None, factor: float) -> None:
    """Multiply a gradient in place. Compute float16 in float32."""
    if grad is not None:
        wide = np.promote_types(grad.dtype, np.float32)
        with np.errstate(over='ignore', invalid='ignore'):
            grad[...] = grad.astype(wide, copy=False) * wide.type(factor)
