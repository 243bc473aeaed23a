"""Messages between stages: outputs in one direction, their gradients in the other.

Receives are posted ahead. A message is a tuple of arrays. The first array describes the others, so
that a rank never mistakes one micro-batch for another.

A message from a device is sent once the device has computed it. Until then, the rank may queue its
next step. No rank waits for such a message forever: whenever this rank waits, for a message or in
an operation that the user's script calls, it sends its messages in the order of its steps.
"""
from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from chainermn._operations.call import Call, subscribe, unsubscribe
from chainermn._operations.table import Waits, waiting_for
from chainermn._types import Array, DeviceEvent, Object
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.links._pipeline.stages import Edge, Stage
from chainermn.links._pipeline.transfers import Transfers

#: The largest tag. Messages use tags from this one downward.
_LAST_TAG = 32767

#: Operations that do not wait for other ranks.
_WITHOUT_WAIT = waiting_for(Waits.NOTHING)

#: Edge, micro-batch, and whether the message is an output (true) or its gradient (false).
Key: TypeAlias = tuple[Edge, int, bool]


class Message(NamedTuple):
    """The data that an edge carries for one micro-batch."""

    arrays: tuple[Array, ...]
    flags: tuple[int, ...]  # whether each array needs a gradient
    is_tuple: bool


class Sent(Protocol):
    """A request returned by ``isend`` or ``irecv``."""

    def wait(self) -> Object:
        """Wait for the request. Return the received arrays."""

    def test(self) -> bool:
        """Return whether the request is complete."""


class _Unsent(NamedTuple):
    """A message and the event after which it may be sent."""

    key: Key
    arrays: Sequence[Array]
    computed: DeviceEvent | None


class StageMessages:
    """Sends and receives the messages of one call of a pipeline.

    Args:
        comm: The communicator.
        stages: All stages.
        call: The number of the call; the same on all ranks.
        transfers: The transfers of this rank.
    """

    def __init__(self, comm: CommunicatorBase, stages: Sequence[Stage], call: int,
                 transfers: Transfers) -> None:
        self._comm, self._stages, self._call, self._transfers = comm, stages, call, transfers
        self._unsent: deque[_Unsent] = deque()
        self._sent: list[Sent] = []
        self._posted: dict[Key, Sent] = {}
        self._local: dict[Key, Message] = {}  # messages of this rank to itself
        self._receiving: Sent | None = None
        self._step_began = 0.
        self._thread = threading.get_ident()

    def post(self, keys: Iterable[Key]) -> None:
        """Begin to receive messages, in the order of micro-batches."""
        self._step_began = time.perf_counter()
        for key in keys:
            peer = self._peer(key, is_sender=False)
            if peer != self._comm.rank and key not in self._posted:
                with self._comm.called_by(self._described(*key)):
                    self._posted[key] = self._comm.irecv(peer, _tag(key))

    def receive(self, edge: Edge, micro_batch: int, is_forward: bool) -> Message:
        """Wait for a message."""
        key = edge, micro_batch, is_forward
        if key in self._local:
            return self._local.pop(key)
        self._receiving = request = self._posted.pop(key)
        with self._transfers.on_stream():
            while self._unsent and not request.test():
                self._send_computed()
            head, *arrays = request.wait()
        call, number, is_tuple, *flags = head.tolist()
        if (call, number) != (self._call, micro_batch):
            raise ValueError(
                f'{self._described(*key)}: expected micro-batch {micro_batch} of call {self._call} '
                f'of the pipeline, but got micro-batch {number} of call {call}. If a pipeline '
                'raised an error on some ranks, create a new communicator.')
        self._step_began = time.perf_counter()
        return Message(tuple(self._transfers.received(arrays)), tuple(flags), bool(is_tuple))

    def send(self, edge: Edge, micro_batch: int, is_forward: bool, message: Message) -> None:
        """Begin to send a message. Its arrays may be changed afterwards."""
        key = edge, micro_batch, is_forward
        if self._peer(key, is_sender=True) == self._comm.rank:
            self._local[key] = message
            return
        head = np.array([self._call, micro_batch, message.is_tuple, *message.flags], np.int64)
        self._unsent.append(_Unsent(key, *self._transfers.to_send((head, *message.arrays))))
        # Wait for the device as long as the host has needed for this step. A device that is about
        # as fast as the host computes the message in this time. A slower device still has queued
        # work, so the host can continue.
        until = 2 * time.perf_counter() - self._step_began
        self._send_computed()
        while self._unsent and time.perf_counter() < until:
            self._send_computed()
        if self._unsent:
            subscribe(self)  # not earlier, because it costs time in each operation
        while not self._unsent and self._sent and self._sent[0].test():
            self._sent.pop(0).wait()

    def finish(self) -> None:
        """Wait until all messages have been received."""
        self._send_all()
        for request in self._sent:
            request.wait()
        self._sent.clear()

    def close(self) -> None:
        """Stop observing the operations that the script calls."""
        unsubscribe(self)

    def begin(self, call: Call) -> None:
        """Send all messages before an operation that may wait for other ranks (instrument)."""
        if (self._unsent and call.operation not in _WITHOUT_WAIT
                and call.owner is not self._receiving
                and threading.get_ident() == self._thread):
            self._send_all()

    def end(self, call: Call, args: Sequence[Object], kwargs: Mapping[str, Object],
            result: object, error: BaseException | None) -> None:
        """Do nothing (instrument)."""

    def _send_all(self) -> None:
        while self._unsent:
            self._send_computed()

    def _send_computed(self) -> None:
        """Send the messages that the device has computed, in order."""
        while self._unsent and self._transfers.is_reached(self._unsent[0].computed):
            key, arrays, _ = self._unsent.popleft()
            with self._comm.called_by(self._described(*key)), self._transfers.on_stream():
                self._sent.append(self._comm.isend(
                    arrays, self._peer(key, is_sender=True), _tag(key)))
        if self._unsent:
            os.sched_yield()

    def _peer(self, key: Key, is_sender: bool) -> int:
        """Return the other rank, given whether this rank is the sender of a message."""
        edge, _, is_forward = key
        return self._stages[edge.dest if is_forward == is_sender else edge.source].rank

    def _described(self, edge: Edge, micro_batch: int, is_forward: bool) -> str:
        stage = self._stages[edge.dest if is_forward else edge.source]
        return stage.step_text(micro_batch, is_forward)


def ahead(stages: Sequence[Stage], steps: Sequence[tuple[int, int, bool]]) -> list[Key]:
    """Return the keys of the messages that some steps receive."""
    found: dict[Key, None] = {}
    for number, micro_batch, is_forward in steps:
        stage = stages[number]
        for edge in stage.edges_in if is_forward else stage.edges_out:
            found[edge, micro_batch, is_forward] = None
    return [*found]


def _tag(key: Key) -> int:
    edge, _, is_forward = key
    return _LAST_TAG - 2 * edge.number - is_forward
