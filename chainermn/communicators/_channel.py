"""The interface of communicators for optimizers and functions, beyond the public operations."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from chainermn._collectives.activations import Activation
from chainermn._types import Array, Arrays, Model
from chainermn.communicators import _version7
from chainermn.communicators._version7 import Version7


class Channel:
    """Calls the public methods of ChainerMN 7, so that any communicator has it.

    Args:
        comm: The communicator.
    """

    def __init__(self, comm: Version7) -> None:
        self._comm = comm

    @property
    def can_overlap(self) -> bool:
        """Whether the queue of gradients works on a device, so that double buffering helps."""
        return False

    @property
    def has_nccl(self) -> bool:
        """Whether NCCL sends the arrays that are on a device."""
        return False

    def answer_requests(self) -> None:
        """Answer commands such as ``chainermn top`` from now on, if there was one.

        Only a job with one rank needs it: it has no watchdog that would notice them.
        """

    def share_error(self, operation: str, error: Exception | None) -> None:
        """Raise the errors of all ranks on all ranks. Collective: every rank calls it.

        A communicator that compares calls raises them with the next operation of each rank.

        Args:
            operation: Name of the failed operation, for the message.
            error: The error of this rank, or ``None``.
        """
        _version7.share_error(self._comm, operation, error)

    def join_turn(self, number: int) -> tuple[int, ...]:
        """Exchange the states of all ranks in :func:`chainermn.join`.

        Collective: every rank calls it.

        Args:
            number: The state of this rank.

        Returns:
            The numbers of all ranks, by rank.
        """
        return tuple(self._comm.allgather_obj(number))

    def join_responses(self, error: BaseException) -> tuple[int | None, ...] | None:
        """Find out whether all ranks raised this error, and their states in ``chainermn.join``.

        Args:
            error: An error that this rank raised.

        Returns:
            ``None`` if the error is not from a consistency check of this communicator. Otherwise
            the number of each rank, by rank, with ``None`` for ranks that called something else;
            empty if a rank raised an error before the check, or had exited.
        """
        return None

    def send_activation(self, data: Arrays, dest: int, tag: int, needs_gradient: bool
                        ) -> Activation:
        """Send the output of a part of a model, for :func:`chainermn.functions.send`.

        It is marked, so that a gradient is never received in place of data. Otherwise it is
        like ``send``; ``recv`` can also receive it.

        Args:
            data: Array, or a tuple or list of arrays.
            dest: Rank of the receiver; not this rank.
            tag: Number from 0 to 32767; the receiver passes the same one.
            needs_gradient: Whether :meth:`recv_gradient` will be called.

        Returns:
            An object for :meth:`recv_gradient`. Its attribute ``needs_gradient`` is the argument.
        """
        return _version7.send_activation(self._comm, data, dest, tag, needs_gradient)

    def recv_activation(self, source: int, tag: int) -> tuple[Arrays, Activation]:
        """Receive a message of :meth:`send_activation` or ``send``.

        Args:
            source: Rank of the sender.
            tag: The tag of the sender.

        Returns:
            The array, or a tuple of arrays; and an object for :meth:`send_gradient`, whose
            attribute ``needs_gradient`` tells whether the sender calls :meth:`recv_gradient`.

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
        """Copy each rank's arrays into the same arrays of all ranks, in place.

        Collective: every rank calls it.

        Args:
            shards: A list of arrays for each rank, with the same shapes and dtypes on all ranks.
                The arrays of ``shards[r]`` are sent by rank r, and replaced on all others.
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
            model: As for ``multi_node_mean_grad``.
            zero_fill: As for ``multi_node_mean_grad``.
            shards: For each rank, begin and end of the elements that it needs, in C order, by path
                of the parameter; the other elements are undefined there. Every rank gets all
                elements of a parameter that is in no shard, or in shards that overlap.
        """
        self._comm.multi_node_mean_grad(model, zero_fill)


def with_overridden(channel: Channel, comm: Version7, cls: type) -> Channel:
    """Make a channel call the methods of ChainerMN 7 that a class overrides.

    Args:
        channel: The channel.
        comm: The communicator whose methods to call.
        cls: Its class, or the class of the object that it forwards to.

    Returns:
        ``channel``.
    """
    for name in _version7.overridden_in_channel(cls):
        setattr(channel, name, getattr(Channel(comm), name))
    return channel
