"""The flight recorder: the last operations of each communicator, for reports of hangs.

Every call is recorded, so recording must cost next to nothing: a ring buffer stores the packed
signature, which exists anyway, and it is only formatted for a report.  Call sites cost more, so
they are only recorded if ``CHAINERMN_TIMEOUT`` or ``CHAINERMN_DEBUG`` is set.
"""
from __future__ import annotations

import collections
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from types import CodeType
from typing import NamedTuple, TypeAlias

from chainermn._diagnostics import call_site
from chainermn._diagnostics.world_ranks import WorldRanks
from chainermn._operations import call_signature
from chainermn._operations.ranks import ranks_text
from chainermn._operations.table import END
from chainermn._process import environment, runtime
from chainermn._process.mpi import MPI

#: Capacity of the ring buffer of each communicator.
LENGTH = 64

#: Identifies the calls of a communicator on all of its ranks: class name, ranks, number.
Key: TypeAlias = tuple[str, WorldRanks, int]
#: A message: operation, peer, tag, signature or the part of the program that called it, and the
#: identifier of its thread.
Message: TypeAlias = tuple[str, int, int, bytes | str | None, int]
#: A call as it is passed to the recorder: a packed signature, a message, or text.
Record: TypeAlias = bytes | Message | str


class _Records(runtime.Part):
    """The flight records of this process, and their numbers."""

    def __init__(self) -> None:
        #: In order of creation.
        self.everything: weakref.WeakValueDictionary[int, FlightRecord] = (
            weakref.WeakValueDictionary())
        self.numbers = itertools.count()
        #: The number of objects created so far, by ranks.
        self.communicators: collections.Counter[WorldRanks] = collections.Counter()
        self.services: collections.Counter[WorldRanks] = collections.Counter()
        self.creations: collections.Counter[WorldRanks] = collections.Counter()


class FlightRecord:
    """The flight record of one communicator.  Calls are numbered from 1.

    To record a call, add 1 to ``count``, then call ``record`` with a :data:`Record`.

    Args:
        mpi_comm: The communicator.
    """

    __slots__ = ('__weakref__', 'count', 'inside', 'left_at', 'n_by_callers', 'number', 'ranks',
                 'record', 'ring', 'timeout')

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        #: Ranks in COMM_WORLD.
        self.ranks: WorldRanks = world_ranks(mpi_comm)
        #: The number of the communicator among those of the same ranks.
        self.number: int = 1
        #: Timeout per operation in seconds, 0 for none, ``None`` for the default.
        self.timeout: float | None = None
        self.count: int = 0
        #: How many of the calls an extension or another part of this package made.
        self.n_by_callers: int = 0
        #: The count when this rank left an incomplete operation.
        self.left_at: int = 0
        #: The thread in an operation that waits for all ranks, or the error of a second thread.
        self.inside: object = None
        self.ring: collections.deque[Record | _WithCallSite] = collections.deque(maxlen=LENGTH)
        self.record: Callable[[Record], None] = self.ring.append
        if environment.text(environment.TIMEOUT) or environment.flag(environment.DEBUG):
            self.record = self._record_with_call_site
        records = runtime.get(_Records)
        records.everything[next(records.numbers)] = self

    def _record_with_call_site(self, record: Record) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(call_site.LAYERS) and frame.f_back is not None:
            frame = frame.f_back
        self.ring.append(_WithCallSite(record, frame.f_code, frame.f_lasti))

    def _flight_records(self) -> tuple[FlightRecord, ...]:
        return self,

    @property
    def key(self) -> Key:
        return type(self).__name__, self.ranks, self.number

    @property
    def effective_timeout(self) -> float | None:
        """The timeout that applies to its operations."""
        return self.timeout

    @property
    def entered(self) -> int:
        """The number of operations entered so far for which this rank needs the others."""
        return self.count

    @property
    def name(self) -> str:
        """The name of the communicator."""
        number = f' {self.number}' if self.number > 1 else ''
        return f'communicator{number} of {ranks_text(self.ranks)}'

    @property
    def newest_record(self) -> Record | None:
        """The newest record, or ``None`` if there is none."""
        newest = self.ring[-1] if self.ring else None
        return newest.record if isinstance(newest, _WithCallSite) else newest

    @property
    def newest(self) -> Call | None:
        """The newest call, or ``None`` if there is none."""
        return next(iter(self.recorded()[-1:]), None)

    def newest_of(self, thread: int) -> Call | None:
        """Return the newest call of a thread that is in an operation."""
        return self.newest  # one thread at a time is in a collective

    def recorded(self) -> list[Call]:
        """Return the recorded calls, the newest last."""
        count, ring = self.count, list(self.ring)
        return [Call.of(record, count - len(ring) + n) for n, record in enumerate(ring, 1)]


class MessageRecord(FlightRecord):
    """The messages of one communicator, counted by peer and tag."""

    __slots__ = 'received', 'receiving', 'sent', 'sent_at'

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        super().__init__(mpi_comm)
        #: Including those that are leaving.
        self.sent: collections.defaultdict[tuple[int, int], int] = collections.defaultdict(int)
        self.received: collections.defaultdict[tuple[int, int], int] = collections.defaultdict(int)
        #: Messages whose data is still arriving.
        self.receiving: collections.defaultdict[tuple[int, int], int] = collections.defaultdict(int)
        #: The number of the call that has sent its message most recently.
        self.sent_at = 0

    def newest_of(self, thread: int) -> Call | None:
        count, ring = self.count, list(self.ring)
        for age, recorded in enumerate(reversed(ring)):
            message = recorded.record if isinstance(recorded, _WithCallSite) else recorded
            if isinstance(message, tuple) and message[4] == thread:
                return Call.of(recorded, count - age)
        return None

    def count_sent(self, dest: int, tag: int) -> None:
        """Count the message of the newest call, just before it leaves."""
        self.sent[dest, tag] += 1
        self.sent_at = self.count


class ServiceRecord(FlightRecord):
    """The requests of a service, which ranks answer until all have closed it."""

    __slots__ = 'asked', 'thread'

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        super().__init__(mpi_comm)
        services = runtime.get(_Records).services
        services[self.ranks] += 1
        self.number = services[self.ranks]
        #: The ranks in COMM_WORLD that each thread has asked most recently, by its identifier.
        self.asked: dict[int, tuple[int, ...]] = {}
        #: The identifier of the thread that answers.
        self.thread: int | None = None

    @property
    def name(self) -> str:
        number = f' {self.number}' if self.number > 1 else ''
        return f'service{number} of {ranks_text(self.ranks)}'


class CreationRecord(FlightRecord):
    """A running create_communicator, which records no calls."""

    __slots__ = ()

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        super().__init__(mpi_comm)
        creations()[self.ranks] += 1


class BackgroundRecord(FlightRecord):
    """The calls that wait for a queue of exchanges; the ranks need each other for the exchanges.

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


class _WithCallSite(NamedTuple):
    record: Record
    code: CodeType
    instruction: int

    @property
    def call_site(self) -> str:
        """File and line; empty if no program called it, as during shutdown."""
        if self.code.co_filename.startswith(call_site.LAYERS):
            return ''
        line = next((line for start, end, line in self.code.co_lines()
                     if start <= self.instruction < end), None)
        return f'{os.path.basename(self.code.co_filename)}:{line or self.code.co_firstlineno}'


class Call(NamedTuple):
    """A recorded call."""

    number: int
    operation: str
    details: str
    peer: int | None  # of a message; negative for any rank
    tag: int | None  # of a message; negative for any tag
    call_site: str

    @classmethod
    def of(cls, record: Record | _WithCallSite, number: int) -> Call:
        site, peer, tag = '', None, None
        if isinstance(record, _WithCallSite):
            site = record.call_site
            record = record.record
        if isinstance(record, tuple):
            operation, peer, tag, more, _ = record
            details = 'to ' if 'send' in operation else 'from '
            details += 'any rank' if peer < 0 else f'rank {peer}'
            details += ' any tag' if tag < 0 else f' tag {tag}'
            if isinstance(more, bytes):
                details += f' {str(call_signature.unpack(more)).partition(" ")[2]}'
            elif more is not None:
                details += f' of {more}'
        else:
            text = str(call_signature.unpack(record)) if isinstance(record, bytes) else record
            operation, details = (text, '') if text == END else text.partition(' ')[::2]
        return cls(number, operation, details, peer, tag, site)

    @property
    def text(self) -> str:
        return f'{self.operation} #{self.number} {self.details}'.rstrip()


def assign_number(communicator: Iterable[FlightRecord]) -> None:
    """Assign a number to a new communicator, unique among those of the same ranks."""
    communicators = runtime.get(_Records).communicators
    for n, calls in enumerate(communicator):
        communicators[calls.ranks] += n == 0
        calls.number = communicators[calls.ranks]


def creations() -> collections.Counter[WorldRanks]:
    """Return the number of create_communicator calls that have started, by ranks."""
    return runtime.get(_Records).creations


def everything() -> list[FlightRecord]:
    """Return the flight records of all existing communicators, in order of creation."""
    return list(runtime.get(_Records).everything.values())


def n_calls_of_program() -> int:
    """Return how many calls the program itself has made, on all existing communicators."""
    return sum(calls.count - calls.n_by_callers for calls in everything())


def summary(recorded: Iterable[Call]) -> str:
    """Format calls; consecutive calls that differ only in their number share one text."""
    runs: list[tuple[Call, int]] = []
    for call in recorded:
        first, last = runs[-1] if runs else (None, 0)
        if first is not None and call[1:] == first[1:] and call.number == last + 1:
            runs[-1] = first, call.number
        else:
            runs.append((call, call.number))
    return '; '.join(
        (f'{first.operation} #{first.number}{f"-{last}" if last > first.number else ""} '
         f'{first.details}').rstrip() + (
             f', called at {first.call_site}' if first.call_site else '')
        for first, last in runs)


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
