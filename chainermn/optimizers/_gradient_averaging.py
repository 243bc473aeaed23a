"""Averaging of gradients: all at once, unless a subclass overrides that."""
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

#: Function that returns the gradient to average, given a parameter, its gradient in this update,
#: and the loss scale.
Completed = Callable[[Parameter, Array, 'float | None'], Array]


class _CompressorUsers(runtime.ProcessState):
    def __init__(self) -> None:
        self.users: weakref.WeakSet[GradientAveraging] = weakref.WeakSet()

    def in_child(self) -> bool:
        return True


class GradientAveraging:
    """Replaces the gradients of a model with their means over all ranks, after the backward pass.

    Subclasses send gradients earlier or later and store the state that they need for this.

    Args:
        actual_optimizer: The optimizer of the model.
        communicator: The communicator whose ranks average gradients.
        zero_fill: Whether missing gradients of a rank count as zero.
        compression: The compressor, or ``None``. It is copied if another optimizer uses it.

    Attributes:
        public: Names of the attributes that the multi-node optimizer also has.
    """

    public: ClassVar[tuple[str, ...]] = 'zero_fill', 'compression'

    def __init__(self, actual_optimizer: Optimizer, communicator: CommunicatorBase, zero_fill: bool,
                 compression: Compressor | PowerSGD | None = None) -> None:
        self.actual_optimizer = actual_optimizer
        self.communicator = communicator
        self.zero_fill = zero_fill
        self.compression = _exclusive_compressor(compression, self)
        self._accepts_zero_fill = mean_grad_accepts(communicator, False)

    def reset(self) -> None:
        """Forget the model, because the optimizer gets a different one."""
        if self.compression is not None and hasattr(self.compression, 'reset'):
            self.compression.reset()

    def begin(self) -> None:
        """Begin an update. The previous update may have failed."""
        self._commit()

    def skip(self) -> None:
        """Undo the last averaging. Its means were not finite, so the step was skipped."""
        self._rollback()

    def _commit(self) -> None:
        """Make the compressor commit the gradients that were sent."""
        if hasattr(self.compression, 'commit'):
            self.compression.commit()  # type: ignore[union-attr]

    def _rollback(self, *args: Collection[str]) -> None:
        """Make the compressor resend the gradients that were sent since the last commit."""
        if hasattr(self.compression, 'rollback'):
            self.compression.rollback(*args)  # type: ignore[union-attr]

    def backward(self, loss: Variable, named: Named, completed: Completed | None) -> None:
        """Compute the gradients of this rank.

        Args:
            loss: The loss.
            named: All parameters of the model.
            completed: Function that returns the gradients to average; ``None`` if this update
                averages none.
        """
        compute_gradients(self.actual_optimizer, loss)

    def broadcast(self) -> None:
        """Copy the parameters of rank 0 if some are new. Collective: every rank calls it."""
        self.communicator.bcast_data(self.actual_optimizer.target)

    def mean(self, shards: Sequence[Shard] | None) -> bool:
        """Replace the gradients of the model with means. Collective: every rank calls it.

        Args:
            shards: The gradient elements that each rank needs; ``None`` for all.

        Returns:
            Whether there are means with which the optimizer can step.
        """
        try:
            self._mean(shards)
        except BaseException:
            self._rollback()
            raise
        return True

    def _mean(self, shards: Sequence[Shard] | None) -> None:
        comm, target = self.communicator, self.actual_optimizer.target
        gradient_memory.own(target.params(include_uninit=False))  # replaced in place below
        # A user-defined communicator need not accept this argument if it is not used.
        options: dict[str, Object] = {} if self.compression is None else {
            'compression': self.compression}
        if not self._accepts_zero_fill:
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


def mean_grad_accepts(communicator: CommunicatorBase, *args: object, **kwds: object) -> bool:
    """Return whether multi_node_mean_grad, which may be user-defined, accepts these arguments."""
    try:
        inspect.signature(communicator.multi_node_mean_grad).bind(None, *args, **kwds)
    except TypeError:
        return False
    return True


def _exclusive_compressor(compressor: Compressor | PowerSGD | None, user: GradientAveraging
                          ) -> Compressor | PowerSGD | None:
    """Return a compressor that no other object uses, because its state belongs to one model.

    Args:
        compressor: A compressor.
        user: The object that stores the result in its attribute ``compression``.

    Returns:
        The compressor, or a copy without state if it has state and another object uses it.

    Raises:
        ValueError: If the compressor cannot be copied.
    """
    users = runtime.get(_CompressorUsers).users
    if hasattr(compressor, 'reset') and any(each.compression is compressor for each in users):
        try:
            compressor = copy.deepcopy(compressor)
        except Exception as error:
            raise ValueError(
                f'the compressor {type(compressor).__name__} is already used by another multi-node '
                f'optimizer and has state that cannot be copied ({type(error).__name__}: {error}).'
                ' Create a separate compressor for each optimizer.') from error
        compressor.reset()  # type: ignore[union-attr]
    users.add(user)
    return compressor
