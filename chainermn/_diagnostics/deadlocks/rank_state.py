"""The state of a rank: its threads, the operations that it has entered, and its messages.

Waiting ranks send their states to another rank, which finds deadlocks (``wait_graph``). A rank in
an operation counts as waiting only for ranks that have not entered the same operation, because the
others may be busy unpickling, adding, or receiving a large array.
"""
from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias

from chainermn._diagnostics import flight_recorder
from chainermn._diagnostics.flight_recorder import (
    BackgroundRecord,
    CreationRecord,
    FlightRecord,
    Key,
    MessageRecord,
    ServiceRecord,
    creations,
)
from chainermn._diagnostics.world_ranks import WorldRanks
from chainermn._operations.call import Call
from chainermn._operations.table import END, Waits, waiting_for
from chainermn._process import runtime

#: Operations that block for messages.
_BLOCKING = waiting_for(Waits.RECEIVER, Waits.SENDER, Waits.MESSAGES)
_SENDS = waiting_for(Waits.RECEIVER)

Counts: TypeAlias = dict[tuple[int, int], int]  # messages by peer and tag


class Shutdown(runtime.ProcessState):
    """The progress of this rank's shutdown."""

    def __init__(self) -> None:
        #: The communicator whose shutdown exchange this rank is in.
        self.ending: FlightRecord | None = None
        #: Whether this rank enters no more shutdown exchanges.
        self.may_exit = False


def shutdown() -> Shutdown:
    """Return the progress of this rank's shutdown."""
    return runtime.get(Shutdown)


class Progress(NamedTuple):
    """The operations that a rank has entered, and its messages."""

    entered: dict[Key, int]
    creations: dict[WorldRanks, int]  # number of new communicators, by their ranks
    sent: dict[Key, Counts]
    received: dict[Key, Counts]
    receiving: dict[Key, Counts]  # messages whose data is still arriving

    @classmethod
    def of_this_rank(cls) -> Progress:
        """Return the progress of this rank."""
        records = flight_recorder.all_records()
        messages = {
            record.key: record for record in records if isinstance(record, MessageRecord)}
        return cls({record.key: record.entered for record in records},
                   dict(creations()),
                   {key: dict(record.sent) for key, record in messages.items()},
                   {key: dict(record.received) for key, record in messages.items()},
                   {key: {which: n for which, n in list(record.receiving.items()) if n}
                    for key, record in messages.items()})


class WaitKind(enum.Enum):
    """The ranks that an operation waits for."""

    COLLECTIVE = enum.auto()  # ranks that have not entered the operation
    CREATION = enum.auto()  # ranks that have not called create_communicator
    SEND = enum.auto()  # the receiver
    RECEIVE = enum.auto()  # the sender, or one of all ranks
    ASK = enum.auto()  # ranks whose service has not answered


class Wait(NamedTuple):
    """The ranks or messages that an operation waits for; ranks as in its communicator."""

    kind: WaitKind
    key: Key
    number: int = 0  # number of the collective or creation
    peer: int = 0
    tag: int = 0
    asked: WorldRanks = WorldRanks.of(())

    @classmethod
    def of(cls, record: FlightRecord, call: Call) -> Wait | None:
        """Return the ranks or messages that a call waits for, if they are known.

        Args:
            record: A flight record of the call's owner.
            call: A call that a thread is in.
        """
        if isinstance(record, ServiceRecord):
            return cls(WaitKind.ASK, record.key, asked=WorldRanks.of(call.asked))
        if isinstance(record, CreationRecord):
            return cls(WaitKind.CREATION, record.key, creations()[record.ranks])
        if isinstance(record, BackgroundRecord) or not (
                call.operation in _BLOCKING or isinstance(record, MessageRecord)):
            return cls(WaitKind.COLLECTIVE, record.key, record.entered)
        if not isinstance(record, MessageRecord) or call.operation not in _BLOCKING or (
                call.peer is None or call.tag is None):
            return None
        if call.operation not in _SENDS:
            return cls(WaitKind.RECEIVE, record.key, 0, call.peer, call.tag)
        is_sent = record.sent_at == call.number  # otherwise, this rank may be pickling
        return cls(WaitKind.SEND, record.key, 0, call.peer, call.tag) if is_sent else None


class ThreadState(NamedTuple):
    """A snapshot of a thread, for other ranks. A thread is blocked if one of its calls waits."""

    operation: str  # the outermost operation, or ''
    call: str  # the operation with its arguments; without one, the newest call of this rank
    communicator: str  # its name; '' for the first communicator of all ranks
    call_site: str  # in user code, outside of this package and Chainer
    thread: str  # '' for the main thread
    waits: tuple[Wait, ...] = ()  # the waits of its calls
    service: Key | None = None  # the service for which it answers requests

    @property
    def text(self) -> str:
        """The state as text, the same on all ranks in the same state."""
        location = f'at {self.call_site}'
        if self.thread:
            location += f' in thread {self.thread}'
        if not self.operation:
            last = f'; its last operation was {self.call}' if self.call else ''
            return f'not in an operation: it is {location}{last}'
        if self.operation == END:
            return 'at the end of the script'
        return f'in {self._operation}, called {location}'

    @property
    def outline(self) -> str:
        """The text without arguments and peers."""
        thread = f' in thread {self.thread}' if self.thread else ''
        if self.operation == END:
            return self.text
        where = f'in {self.operation}, called' if self.operation else 'not in an operation: it is'
        return f'{where} at {self.call_site}{thread}'

    @property
    def wait_text(self) -> str:
        """The operation in which the thread waits, for reports of deadlocks."""
        return self._waiting_in(self._operation)

    @property
    def wait_outline(self) -> str:
        """The operation in which the thread waits, without arguments and peers."""
        return self._waiting_in(self.operation)

    def _waiting_in(self, operation: str) -> str:
        if self.operation == END:
            return 'at the end of the script'
        thread = f' in thread {self.thread}' if self.thread else ''
        return f'in {operation} ({self.call_site}{thread})'

    @property
    def _operation(self) -> str:
        of = f' of {self.communicator}' if self.communicator else ''
        return f'{self.call or self.operation}{of}'


class RankState(NamedTuple):
    """The state of a rank none of whose threads can make progress by itself."""

    progress: Progress
    threads: tuple[ThreadState, ...]
    is_finished: bool  # whether the rank is at the end of the script
    may_exit: bool  # whether the rank enters no more operations
