"""Averaging of gradients: all together, unless a subclass overrides that."""
from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

from chainer_compat.updates import gradient_memory
from chainermn._process import runtime
from chainermn._types import Array, Object, Optimizer, Parameter, Serializer, Variable
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers._optimizer_proxy import compute_gradients, fill_missing_grad
from chainermn.optimizers._optimizer_settings import Named
from chainermn.optimizers._sharded_states.partition import Shard

if TYPE_CHECKING:
    from chainermn.communicators.compression import Compressor, PowerSGD

#: Returns the contribution of a gradient of this update, with its loss scale, to the mean.
Completed = Callable[[Parameter, Array, 'float | None'], Array]


class _CompressorUsers(runtime.ProcessState):
    def __init__(self) -> None:
        self.users: weakref.WeakSet[GradientAveraging] = weakref.WeakSet()

    def in_child(self) -> bool:
        return True


class GradientAveraging:
    """Replaces the gradients of a model by their means over all ranks: all after backward.

    Subclasses send them earlier or later, and have all the state that they need for that.

    Args:
        actual_optimizer: The optimizer of the model.
        communicator: The ranks.
        zero_fill: Whether gradients that a rank lacks count as zero.
        compression: The compressor, or ``None``; a copy if another optimizer uses it.

    Attributes:
        public: Names of the attributes that the multi-node optimizer also has.
    """

    public: ClassVar[tuple[str, ...]] = 'zero_fill', 'compression'

    def __init__(self, actual_optimizer: Optimizer, communicator: CommunicatorBase, zero_fill: bool,
                 compression: Compressor | PowerSGD | None = None) -> None:
        self.actual_optimizer = actual_optimizer
        self.communicator = communicator
        self.zero_fill = zero_fill
        self.compression = _own_compressor(compression, self)
        self._takes_zero_fill = takes(communicator, False)

    def reset(self) -> None:
        """Forget the model: the optimizer gets another one."""
        if self.compression is not None and hasattr(self.compression, 'reset'):
            self.compression.reset()

    def begin(self) -> None:
        """Begin an update. The one before may have failed."""
        self._commit()

    def skip(self) -> None:
        """Take back the last exchange, whose means were not finite, so there was no step."""
        self._rollback()

    def _commit(self) -> None:
        """Let the compressor commit the gradients that it has sent."""
        if hasattr(self.compression, 'commit'):
            self.compression.commit()  # type: ignore[union-attr]

    def _rollback(self, *args: Collection[str]) -> None:
        """Let the compressor send again the gradients sent since the last commit."""
        if hasattr(self.compression, 'rollback'):
            self.compression.rollback(*args)  # type: ignore[union-attr]

    def backward(self, loss: Variable, named: Named, completed: Completed | None) -> None:
        """Compute the gradients of this rank.

        Args:
            loss: The loss.
            named: All parameters of the model.
            completed: Returns the gradients to average; ``None`` if this update averages none.
        """
        compute_gradients(self.actual_optimizer, loss)

    def broadcast(self) -> None:
        """Copy the parameters of rank 0, when some are new. Collective: all ranks call it."""
        self.communicator.bcast_data(self.actual_optimizer.target)

    def mean(self, shards: Sequence[Shard] | None) -> bool:
        """Replace the gradients of the model by means. Collective: every rank calls it.

        Args:
            shards: The elements of gradients that each rank needs; ``None``: all.

        Returns:
            Whether there are means, with which the optimizer steps.
        """
        try:
            self._mean(shards)
        except BaseException:
            self._rollback()
            raise
        return True

    def _mean(self, shards: Sequence[Shard] | None) -> None:
        comm, target = self.communicator, self.actual_optimizer.target
        gradient_memory.own(target.params(include_uninit=False))  # they are replaced in place
        # A user's communicator need not accept this argument if it is not used.
        options: dict[str, Object] = {} if self.compression is None else {
            'compression': self.compression}
        if not self._takes_zero_fill:
            if self.zero_fill:
                for param in target.params(include_uninit=False):
                    fill_missing_grad(param)
            comm.multi_node_mean_grad(target, **options)
        elif shards is None or options:
            comm.multi_node_mean_grad(target, self.zero_fill, **options)
        else:
            comm._chainermn_channel.mean_grad_shards(target, self.zero_fill, shards)

    def wait(self) -> None:
        """Wait for the gradients in flight."""

    def check_join(self) -> None:
        """Raise ValueError on all ranks if exhausted ranks cannot take part in :meth:`mean`."""

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the gradients that this rank has not sent yet."""
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


def takes(communicator: CommunicatorBase, *args: object, **kwds: object) -> bool:
    """Return whether multi_node_mean_grad has these parameters; in a user's class it may not."""
    try:
        inspect.signature(communicator.multi_node_mean_grad).bind(None, *args, **kwds)
    except TypeError:
        return False
    return True


def _own_compressor(compressor: Compressor | PowerSGD | None, user: GradientAveraging
                    ) -> Compressor | PowerSGD | None:
    """Return a compressor that no other object uses, since its state belongs to one model.

    Args:
        compressor: A compressor.
        user: The object whose attribute ``compression`` it becomes.

    Returns:
        The compressor, or a copy without state if it has state and another object uses it.

    Raises:
        ValueError: If it cannot be copied.
    """
    users = runtime.get(_CompressorUsers).users
    if hasattr(compressor, 'reset') and any(each.compression is compressor for each in users):
        try:
            compressor = copy.deepcopy(compressor)
        except Exception as error:
            raise ValueError(
                f'the compressor {type(compressor).__name__} is already used by another multi-node '
                f'optimizer, and has state that cannot be copied ({type(error).__name__}: {error}).'
                ' Create a separate compressor for each optimizer.') from error
        compressor.reset()  # type: ignore[union-attr]
    users.add(user)
    return compressor
