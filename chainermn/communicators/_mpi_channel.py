"""The channel of MPI-based communicators, which is faster and raises better errors."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from chainermn._collectives import arrays, models
from chainermn._collectives.activations import Activation
from chainermn._collectives.context import MpiCommunicator
from chainermn._collectives.operation import operation
from chainermn._diagnostics import watchdog
from chainermn._operations import call_signature, common_error
from chainermn._operations.call_signature import pack
from chainermn._operations.table import END
from chainermn._types import Array, Arrays, Model
from chainermn.communicators._channel import Channel


class MpiChannel(Channel):
    """Calls the MPI-based operations instead of the methods of ChainerMN 7.

    Args:
        comm: The communicator.
    """

    def __init__(self, comm: MpiCommunicator) -> None:
        self._mpi = comm

    @property
    def can_overlap(self) -> bool:
        return self._mpi.transport_class.can_overlap

    @property
    def has_nccl(self) -> bool:
        return self._mpi.transport_class.has_nccl

    def answer_requests(self) -> None:
        watchdog.get().start()

    def share_error(self, operation: str, error: Exception | None) -> None:
        if error is None:
            return
        for each in common_error.chain(error):
            if self._mpi._context.check.mismatch_of(each) is not None:
                raise error  # in the last call, all ranks raised it or its cause
        self._mpi.refuse(operation, error)

    def join_turn(self, number: int) -> tuple[int, ...]:
        return _join_turn(self._mpi, number)

    def join_responses(self, error: BaseException) -> tuple[int | None, ...] | None:
        signatures = self._mpi._context.check.mismatch_of(error)
        if signatures is None:
            return None
        if any(each.failed or each.operation == END for each in signatures):
            return ()
        return tuple(each.number if each.operation == 'join' else None for each in signatures)

    def send_activation(self, data: Arrays, dest: int, tag: int, needs_gradient: bool
                        ) -> Activation:
        return arrays.send_activation(self._mpi, data, dest, tag, needs_gradient)

    def recv_activation(self, source: int, tag: int) -> tuple[Arrays, Activation]:
        return arrays.recv_activation(self._mpi, source, tag)

    def send_gradient(self, gradients: Arrays, activation: Activation) -> None:
        arrays.send_gradient(self._mpi, gradients, activation)

    def recv_gradient(self, activation: Activation) -> Arrays:
        return arrays.recv_gradient(self._mpi, activation)

    def allgather_shards(self, shards: Sequence[Sequence[Array]]) -> None:
        models.allgather_shards(self._mpi, shards)

    def mean_grad_shards(self, model: Model, zero_fill: bool,
                         shards: Sequence[Mapping[str, tuple[int, int]]]) -> None:
        models.mean_grad_shards(self._mpi, model, zero_fill, shards)


@operation('join')
def _join_turn(comm: MpiCommunicator, number: int) -> tuple[int, ...]:
    messages = comm._context.check.gather(pack('join', number=number))
    return tuple(call_signature.unpack(message).number for message in messages)
