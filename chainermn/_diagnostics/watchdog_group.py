"""The ranks of a communicator and the messages that their watchdogs exchange."""
from __future__ import annotations

import collections
import enum
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from chainermn._diagnostics.deadlocks.detector import DeadlockDetector
from chainermn._diagnostics.deadlocks.rank_state import RankState
from chainermn._diagnostics.drain import drain
from chainermn._diagnostics.flight_recorder import world_ranks
from chainermn._diagnostics.hang_report import Response
from chainermn._diagnostics.host_links import HostLinks
from chainermn._diagnostics.live_view import Sample
from chainermn._process.mpi import MPI


class MessageType(enum.IntEnum):
    """The purpose of a message."""

    ALARM = 1
    RESPONSE = 2
    STATE = 3  # sent to the rank that detects deadlocks
    CONFIRM = 4
    CONFIRMED = 5
    ASK = 6
    ANSWER = 7
    PING = 8  # sent to the ranks of a host whose link was lost
    PONG = 9
    WATCH = 10  # asks for a sample
    SAMPLE = 11


class State(NamedTuple):
    """The state of a rank; ``None`` if it makes progress."""

    state: RankState | None


class Confirmation(NamedTuple):
    """The state of a rank in a confirmation round."""

    number: int  # number of the round
    state: RankState | None


#: The content of a message: a response, a state, the number of a confirmation round, a sample, or
#: nothing.
Content: TypeAlias = Response | State | Confirmation | int | Sample | None

#: The maximum number of unreceived questions to one rank, which may be stopped.
_MAX_UNRECEIVED = 3


class Question:
    """A question to all ranks about their states, asked twice.

    The first answers arrive as the watchdogs wake up. From then on, all watchdogs poll frequently,
    so the second answers describe nearly the same moment.

    Args:
        text: Function that returns the text to print, given the answers by rank in COMM_WORLD.
    """

    def __init__(self, text: Callable[[Mapping[int, Response]], str]) -> None:
        self.text = text
        self.is_second = False
        self.asked_at = 0.
        self.ranks: set[int] = set()  # ranks that are expected to answer
        self.answers: dict[int, Response] = {}

    def ask(self, now: float, ranks: Iterable[int]) -> None:
        """Start collecting answers.

        Args:
            now: The current time.
            ranks: The ranks to ask.
        """
        self.asked_at, self.ranks, self.answers = now, set(ranks), {}

    def is_complete(self, now: float, seconds: float) -> bool:
        """Return whether all ranks have answered or the time is up.

        Args:
            now: The current time.
            seconds: The time that ranks have to answer.
        """
        return self.ranks <= set(self.answers) or now > self.asked_at + seconds


class WatchdogGroup:
    """The ranks of a communicator and the messages of their watchdogs.

    Without MPI_THREAD_MULTIPLE, there are no messages.
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        can_send = MPI.Query_thread() >= MPI.THREAD_MULTIPLE and mpi_comm.size > 1
        self.mpi_comm = mpi_comm.Dup() if can_send else None
        #: Ranks in COMM_WORLD.
        self.ranks = world_ranks(mpi_comm)
        self.rank = mpi_comm.rank
        #: The name of the host of each rank.
        self.hosts: Sequence[str] = ()
        self.links: HostLinks | None = None
        self.alarmed_at: float | None = None
        #: Responses to an alarm, by rank.
        self.responses: dict[int, Response] = {}
        #: The last state of this rank that was sent to the detector.
        self.sent_state: RankState | None = None
        self.detector = DeadlockDetector()  # used by the first rank
        self.question: Question | None = None
        self.is_dump_requested = False
        self._requests: list[tuple[int, MPI.Request]] = []  # the receiving rank and the request

    def send(self, tag: MessageType, content: Content, ranks: Iterable[int]) -> None:
        """Send a message to some ranks of this group."""
        if self.mpi_comm is not None:
            data = pickle.dumps(content)
            self._requests = [each for each in self._requests if not each[1].Test()]
            # Synchronous, so that drain() can tell when they were received.
            self._requests += [(rank, self.mpi_comm.Issend(data, rank, tag)) for rank in ranks]

    def ask_for_samples(self, ranks: Iterable[int]) -> None:
        """Ask ranks for samples, except those that have not received the previous questions."""
        unreceived = collections.Counter(rank for rank, _ in self._requests)
        self.send(MessageType.WATCH, None, [
            rank for rank in ranks if unreceived[rank] < _MAX_UNRECEIVED])

    def drain(self) -> None:
        """Receive all remaining messages. Collective: every rank calls it.

        Otherwise MPI_Finalize might wait for them.
        """
        if self.mpi_comm is not None:
            drain(self.mpi_comm, self.receive, [request for _, request in self._requests])

    @property
    def others(self) -> list[int]:
        """All ranks of this group except this one."""
        return [rank for rank in range(len(self.ranks)) if rank != self.rank]

    def receive(self) -> list[tuple[int, MessageType, Content]]:
        """Return the sender, tag and content of each message that has arrived."""
        received: list[tuple[int, MessageType, Content]] = []
        status = MPI.Status()
        while self.mpi_comm is not None:
            message = self.mpi_comm.Improbe(status=status)
            if message is None:
                break
            buffer = bytearray(status.Get_count())
            message.Recv(buffer)
            received.append((
                status.Get_source(), MessageType(status.Get_tag()), pickle.loads(buffer)))
        return received
