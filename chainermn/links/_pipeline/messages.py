"""Messages between stages, posted ahead: outputs in one direction, their gradients in the other.

A message is a tuple of arrays, the first of which says what the others are, so that a rank never
takes one micro-batch for another.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from chainermn._types import Array, Object
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.links._pipeline.stages import Edge, Stage

#: The tags of messages are those below.
_LAST_TAG = 32767


class Message(NamedTuple):
    """What an edge carries for one micro-batch."""

    arrays: tuple[Array, ...]
    flags: tuple[int, ...]  # for each array, whether it needs a gradient
    is_tuple: bool


class Sent(Protocol):
    """A request of ``isend`` or ``irecv``."""

    def wait(self) -> Object:
        """Return the received arrays."""

    def test(self) -> bool:
        """Return whether it is complete."""


class StageMessages:
    """Sends and receives the messages of one call of a pipeline.

    Args:
        comm: The communicator.
        stages: All stages.
        call: The number of the call, equal on all ranks.
    """

    def __init__(self, comm: CommunicatorBase, stages: Sequence[Stage], call: int) -> None:
        self._comm, self._stages, self._call = comm, stages, call
        self._sent: list[Sent] = []
        self._posted: dict[tuple[Edge, int, bool], Sent] = {}
        self._local: dict[tuple[Edge, int, bool], Message] = {}  # of this rank to itself

    def post(self, edge: Edge, micro_batch: int, is_forward: bool) -> None:
        """Begin to receive a message, in the order of micro-batches; it may be on its way."""
        key = edge, micro_batch, is_forward
        peer = self._stages[edge.source if is_forward else edge.dest].rank
        if peer != self._comm.rank and key not in self._posted:
            with self._comm.called_by(self._described(*key)):
                self._posted[key] = self._comm.irecv(peer, _tag(edge, is_forward))

    def receive(self, edge: Edge, micro_batch: int, is_forward: bool) -> Message:
        """Wait for a message."""
        key = edge, micro_batch, is_forward
        if key in self._local:
            return self._local.pop(key)
        self.post(*key)
        head, *arrays = self._posted.pop(key).wait()
        call, number, is_tuple, *flags = head.tolist()
        if (call, number) != (self._call, micro_batch):
            raise ValueError(
                f'{self._described(*key)}: expected micro-batch {micro_batch} of call {self._call} '
                f'of the pipeline, got micro-batch {number} of call {call}. After an error in a '
                'pipeline on some ranks, create a new communicator.')
        return Message(tuple(arrays), tuple(flags), bool(is_tuple))

    def send(self, edge: Edge, micro_batch: int, is_forward: bool, message: Message) -> None:
        """Begin to send a message; the arrays are copied, or read at once."""
        peer = self._stages[edge.dest if is_forward else edge.source].rank
        if peer == self._comm.rank:
            self._local[edge, micro_batch, is_forward] = message
            return
        head = np.array([self._call, micro_batch, message.is_tuple, *message.flags], np.int64)
        with self._comm.called_by(self._described(edge, micro_batch, is_forward)):
            self._sent.append(self._comm.isend(
                (head, *message.arrays), peer, _tag(edge, is_forward)))
        while self._sent and self._sent[0].test():
            self._sent.pop(0).wait()

    def finish(self) -> None:
        """Wait until all messages are received."""
        for request in self._sent:
            request.wait()
        self._sent.clear()

    def _described(self, edge: Edge, micro_batch: int, is_forward: bool) -> str:
        stage = self._stages[edge.dest if is_forward else edge.source]
        return (f'the {"forward" if is_forward else "backward"} step of stage {stage.number}, '
                f'micro-batch {micro_batch} of Pipeline ({stage.name})')


def ahead(stages: Sequence[Stage], steps: Sequence[tuple[int, int, bool]]
          ) -> list[tuple[Edge, int, bool]]:
    """Return the messages that some steps receive."""
    found: dict[tuple[Edge, int, bool], None] = {}
    for number, micro_batch, is_forward in steps:
        stage = stages[number]
        for edge in stage.edges_in if is_forward else stage.edges_out:
            found[edge, micro_batch, is_forward] = None
    return [*found]


def _tag(edge: Edge, is_forward: bool) -> int:
    return _LAST_TAG - 2 * edge.number - is_forward
