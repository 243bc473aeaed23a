"""The flight recorder: the last calls of each communicator, for reports of hangs.

Every call is recorded, so recording must cost next to nothing: a ring buffer keeps the ``Call``
objects, which exist anyway, and only a report formats them. Call sites cost more, so they are only
recorded if ``CHAINERMN_TIMEOUT`` or ``CHAINERMN_DEBUG`` is set.
"""
from __future__ import annotations

import collections
import contextlib
import itertools
import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import TypeAlias

from chainermn._diagnostics.world_ranks import WorldRanks
from chainermn._operations import call_signature
from chainermn._operations.call import Call, local
from chainermn._operations.ranks import ranks_text
from chainermn._process import environment, runtime
from chainermn._process.mpi import MPI
from chainermn._process.program_place import PACKAGES

#: Capacity of the ring buffer of each communicator.
LENGTH = 64

#: Identifies the calls of a communicator on all of its ranks: class name, ranks, number.
Key: TypeAlias = tuple[str, WorldRanks, int]


class _Records(runtime.ProcessState):
    """The flight records of this process, and their numbers."""

    def __init__(self) -> None:
        #: The flight records, in order of creation.
        self.by_number: weakref.WeakValueDictionary[int, FlightRecord] = (
            weakref.WeakValueDictionary())
        self.numbers = itertools.count()
        #: The number of calls by user code on communicators that no longer exist.
        self.n_former_calls = 0
        #: The number of objects created so far, by ranks.
        self.communicators: collections.Counter[WorldRanks] = collections.Counter()
        self.services: collections.Counter[WorldRanks] = collections.Counter()
        self.creations: collections.Counter[WorldRanks] = collections.Counter()


class FlightRecord:
    """The flight record of one communicator. Calls are numbered from 1.

    Args:
        mpi_comm: The communicator.
    """

    __slots__ = ('__weakref__', '_has_sites', 'before', 'conflict', 'count', 'inside', 'left_at',
                 'n_by_callers', 'number', 'ranks', 'ring', 'timeout')

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        #: The ranks of the communicator, as numbered in COMM_WORLD.
        self.ranks: WorldRanks = world_ranks(mpi_comm)
        #: The number of the communicator among communicators of the same ranks.
        self.number: int = 1
        #: The timeout per operation in seconds; 0 for no timeout, ``None`` for the default.
        self.timeout: float | None = None
        self.count: int = 0
        #: The number of calls by extensions or other parts of this package.
        self.n_by_callers: int = 0
        #: The count when this rank left an incomplete operation.
        self.left_at: int = 0
        #: The collective call in progress, in one thread at a time, and the count before it.
        self.inside: Call | None = None
        self.before: int = 0
        #: The operation and error of a second thread that the other ranks do not know about yet.
        self.conflict: tuple[str, RuntimeError] | None = None
        self.ring: collections.deque[Call] = collections.deque(maxlen=LENGTH)
        self._has_sites = bool(
            environment.text(environment.TIMEOUT) or environment.flag(environment.DEBUG))
        records = runtime.get(_Records)
        records.by_number[next(records.numbers)] = self

    def __del__(self) -> None:
        if None not in (_Records, runtime):  # at exit, Python sets module globals to None
            runtime.get(_Records).n_former_calls += self.count - self.n_by_callers

    def add(self, signature: bytes | None = None, operation: str = '') -> Call:
        """Record that this rank waits for other ranks in its current call; return the call.

        Args:
            signature: The signature that the ranks compare.
            operation: The name of the operation if there is no signature.
        """
        call = self.inside or local.thread.innermost
        if call is None or call.number:  # not in an operation, or in a second exchange of one
            call = Call()
            call.operation = operation
            if signature is not None:
                call.operation = call_signature.unpack(signature).operation
        call.signature = signature
        self.count = call.number = self.count + 1
        self.ring.append(call)
        if self._has_sites:
            _note_site(call)
        return call

    def forget(self) -> None:
        """Undo :meth:`add` for the newest call, which no other rank knows about."""
        if self.ring and self.ring[-1].number == self.count:
            self.ring.pop().number = 0
        self.count -= 1

    def _flight_records(self) -> tuple[FlightRecord, ...]:
        return self,

    @property
    def key(self) -> Key:
        return type(self).__name__, self.ranks, self.number

    @property
    def effective_timeout(self) -> float | None:
        """The timeout that applies to the operations of the communicator."""
        return self.timeout

    @property
    def entered(self) -> int:
        """The number of operations entered so far that need the other ranks."""
        return self.count

    @property
    def name(self) -> str:
        """The name of the communicator."""
        number = f' {self.number}' if self.number > 1 else ''
        return f'communicator{number} of {ranks_text(self.ranks)}'

    @property
    def newest(self) -> Call | None:
        """The newest call, or ``None`` if there is none."""
        return self.ring[-1] if self.ring else None


class MessageRecord(FlightRecord):
    """The messages of one communicator, counted by peer and tag."""

    __slots__ = 'received', 'receiving', 'sent', 'sent_at'

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        super().__init__(mpi_comm)
        #: Sent messages, including those that are just being sent.
        self.sent: collections.defaultdict[tuple[int, int], int] = collections.defaultdict(int)
        self.received: collections.defaultdict[tuple[int, int], int] = collections.defaultdict(int)
        #: Messages whose data is still arriving.
        self.receiving: collections.defaultdict[tuple[int, int], int] = collections.defaultdict(int)
        #: The number of the call that has sent its message most recently.
        self.sent_at = 0

    def add_message(self, operation: str, peer: int, tag: int,
                       header: bytes | None = None) -> Call:
        """Record a message of the calling thread in its innermost call; return the call."""
        call = local.thread.innermost
        if call is None or call.number:
            call = Call()
            call.operation = operation
        call.peer = peer
        call.tag = tag
        call.header = header
        self.count = call.number = self.count + 1
        self.ring.append(call)
        if self._has_sites:
            _note_site(call)
        return call

    def count_sent(self, dest: int, tag: int) -> None:
        """Count the message of the newest call, just before it is sent."""
        self.sent[dest, tag] += 1
        self.sent_at = self.count


class ServiceRecord(FlightRecord):
    """The requests of a service. Ranks answer requests until all ranks have closed the service."""

    __slots__ = 'thread',

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        super().__init__(mpi_comm)
        services = runtime.get(_Records).services
        services[self.ranks] += 1
        self.number = services[self.ranks]
        #: The identifier of the thread that answers.
        self.thread: int | None = None

    @property
    def name(self) -> str:
        number = f' {self.number}' if self.number > 1 else ''
        return f'service{number} of {ranks_text(self.ranks)}'


class CreationRecord(FlightRecord):
    """A running create_communicator call. This record contains no calls."""

    __slots__ = ()

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        super().__init__(mpi_comm)
        creations()[self.ranks] += 1


class BackgroundRecord(FlightRecord):
    """The calls that wait for a queue of background exchanges, which need all ranks.

    Args:
        mpi_comm: The communicator.
        transport: The flight record of the communicator that the exchanges use.
    """

    __slots__ = '_transport', 'exchanges'

    def __init__(self, mpi_comm: MPI.Intracomm, transport: FlightRecord) -> None:
        super().__init__(mpi_comm)
        self.number = transport.number
        self._transport = transport
        self.exchanges = 0

    @property
    def effective_timeout(self) -> float | None:
        return self._transport.timeout

    @property
    def entered(self) -> int:
        return self.exchanges

    @property
    def name(self) -> str:
        return f'gradient queue of {ranks_text(self.ranks)}'


def _note_site(call: Call) -> None:
    """Record the line of user code, if any; there is none at shutdown or in ChainerMN's threads."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGES):
            call.place = code, frame.f_lasti
            return
        frame = frame.f_back


def of_owner(call: Call) -> tuple[FlightRecord, ...]:
    """Return the flight records of the owner of a call."""
    with contextlib.suppress(Exception):  # the owner may be finalized by now, or have no records
        return tuple(call.owner._flight_records())
    return ()


def assign_number(records: Iterable[FlightRecord]) -> None:
    """Give the records of a new communicator a number, unique among those of the same ranks."""
    communicators = runtime.get(_Records).communicators
    for n, record in enumerate(records):
        communicators[record.ranks] += n == 0
        record.number = communicators[record.ranks]


def creations() -> collections.Counter[WorldRanks]:
    """Return the number of create_communicator calls that have started, by ranks."""
    return runtime.get(_Records).creations


def all_records() -> list[FlightRecord]:
    """Return the flight records of all existing communicators, in order of creation."""
    return list(runtime.get(_Records).by_number.values())


def n_operations() -> int:
    """Return the number of operations so far on all existing communicators."""
    return sum(record.count for record in all_records())


def n_calls_of_program() -> int:
    """Return the number of calls that user code itself has made on all communicators."""
    return runtime.get(_Records).n_former_calls + sum(
        record.count - record.n_by_callers for record in all_records())


def summary(calls: Iterable[Call]) -> str:
    """Format calls; consecutive calls that differ only in their number share one text."""
    runs: list[list[Call]] = []
    for call in calls:
        if runs and _described(call) == _described(runs[-1][0]) and (
                call.number == runs[-1][-1].number + 1):
            runs[-1].append(call)
        else:
            runs.append([call])
    texts = []
    for first, *others in runs:
        numbers = f'{first.number}-{others[-1].number}' if others else str(first.number)
        texts.append(f'{first.operation} #{numbers} {first.details}'.rstrip() + (
            f', called at {first.site}' if first.site else ''))
    return '; '.join(texts)


def _described(call: Call) -> tuple[str, str, str]:
    return call.operation, call.details, call.site


def world_ranks(mpi_comm: MPI.Comm) -> WorldRanks:
    """Return the ranks of a communicator in COMM_WORLD."""
    group, world = mpi_comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        ranks = range(group.size)
        if MPI.Group.Compare(group, world) == MPI.IDENT:
            return WorldRanks.of(ranks)
        return WorldRanks.of(MPI.Group.Translate_ranks(group, ranks, world))
    finally:
        group.Free()
        world.Free()
