"""The interface of communicators that optimizers and functions use beyond public operations."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from chainermn._collectives.activations import Activation
from chainermn._types import Array, Arrays, Model
from chainermn.communicators import _version7
from chainermn.communicators._version7 import Version7


class Channel:
    """Calls only public methods of ChainerMN 7, so it works with any communicator.

    Args:
        comm: The communicator.
    """

    def __init__(self, comm: Version7) -> None:
        self._comm = comm

    @property
    def can_overlap(self) -> bool:
        """Whether a device averages gradients in the background, so that double buffering helps."""
        return False

    @property
    def has_nccl(self) -> bool:
        """Whether NCCL is used for arrays on a device."""
        return False

    def answer_requests(self) -> None:
        """Respond to commands such as ``chainermn top`` from now on, if one has been run.

        Only jobs with one rank need this method, because they have no watchdog to notice commands.
        """

    def share_error(self, operation: str, error: Exception | None) -> None:
        """Raise the errors of all ranks on all ranks. Collective: every rank calls it.

        If the communicator compares calls, ranks without an error raise it in their next operation.

        Args:
            operation: Name of the failed operation, for the message.
            error: Error of this rank, or ``None``.
        """
        _version7.share_error(self._comm, operation, error)

    def join_turn(self, number: int) -> tuple[int, ...]:
        """Exchange the states of all ranks in :func:`chainermn.join`.

        Collective: every rank calls it.

        Args:
            number: The state of this rank, as a number.

        Returns:
            The number of each rank, by rank.
        """
        return tuple(self._comm.allgather_obj(number))

    def join_responses(self, error: BaseException) -> tuple[int | None, ...] | None:
        """Return the states of all ranks in ``chainermn.join`` if a consistency check failed.

        Args:
            error: An error that this rank raised.

        Returns:
            ``None`` if the error is not from a consistency check of this communicator. Otherwise
            the number of each rank, by rank, with ``None`` for ranks that called a different
            operation. The tuple is empty if a rank raised an error before the check or has exited.
        """
        return None

    def send_activation(self, data: Arrays, dest: int, tag: int, needs_gradient: bool
                        ) -> Activation:
        """Send the output of a part of a model, for :func:`chainermn.functions.send`.

        The message is marked, so that a gradient is never received in place of data. Otherwise,
        this method is like ``send``, and ``recv`` can also receive the message.

        Args:
            data: Array, or a tuple or list of arrays.
            dest: Rank of the receiver; not this rank.
            tag: Integer from 0 to 32767; the receiver passes the same tag.
            needs_gradient: Whether :meth:`recv_gradient` will be called.

        Returns:
            An object for :meth:`recv_gradient`. Its attribute ``needs_gradient`` has the value of
            the argument.
        """
        return _version7.send_activation(self._comm, data, dest, tag, needs_gradient)

    def recv_activation(self, source: int, tag: int) -> tuple[Arrays, Activation]:
        """Receive a message that was sent with :meth:`send_activation` or ``send``.

        Args:
            source: Rank of the sender.
            tag: The tag that the sender passed.

        Returns:
            A pair. The first element is an array or a tuple of arrays. The second one is an object
            for :meth:`send_gradient`. Its attribute ``needs_gradient`` tells whether the sender
            will call :meth:`recv_gradient`.

        Raises:
            ValueError: If a gradient arrives.
        """
        return _version7.recv_activation(self._comm, source, tag)

    def send_gradient(self, gradients: Arrays, activation: Activation) -> None:
        """Send the gradient of a received activation to its sender, if the sender needs it.

        Args:
            gradients: Array, or a tuple of arrays.
            activation: The second result of :meth:`recv_activation`.
        """
        if activation.needs_gradient:
            self._comm.send(gradients, activation.peer, activation.tag)

    def recv_gradient(self, activation: Activation) -> Arrays:
        """Receive the gradient of a sent activation.

        Args:
            activation: The result of :meth:`send_activation`, with ``needs_gradient`` true.

        Returns:
            The array, or a tuple of arrays.

        Raises:
            ValueError: If data other than a gradient arrives.
        """
        return self._comm.recv(activation.peer, activation.tag)

    def allgather_shards(self, shards: Sequence[Sequence[Array]]) -> None:
        """Copy each rank's arrays into the corresponding arrays of all other ranks, in place.

        Collective: every rank calls it.

        Args:
            shards: A list of arrays for each rank, with the same shapes and dtypes on all ranks.
                Rank r sends the arrays ``shards[r]``; all other ranks overwrite theirs.
        """
        for root, own in enumerate(shards):
            for x in own:
                received = self._comm.bcast(x if root == self._comm.rank else None, root=root)
                if root != self._comm.rank:
                    x[...] = received

    def mean_grad_shards(self, model: Model, zero_fill: bool,
                         shards: Sequence[Mapping[str, tuple[int, int]]]) -> None:
        """Average the gradients; each rank needs only its shard of the means.

        Collective: every rank calls it.

        Args:
            model: See ``multi_node_mean_grad``.
            zero_fill: See ``multi_node_mean_grad``.
            shards: For each rank, a dict from the path of a parameter to the start and end of the
                elements that the rank needs, in C order. All other elements are undefined on that
                rank. If a parameter is in no shard, or in shards that overlap, every rank gets all
                of its elements.
        """
        self._comm.multi_node_mean_grad(model, zero_fill)


def with_overridden(channel: Channel, comm: Version7, cls: type) -> Channel:
    """Make a channel call the methods of ChainerMN 7 that a class overrides.

    Args:
        channel: The channel.
        comm: Communicator whose methods are called.
        cls: Class of the communicator, or of the object to which it forwards calls.

    Returns:
        ``channel``.
    """
    for name in _version7.overridden_in_channel(cls):
        setattr(channel, name, getattr(Channel(comm), name))
    return channel
