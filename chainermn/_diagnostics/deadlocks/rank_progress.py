"""The progress of a rank: the operations that it has entered, and its messages.

Ranks that wait send it to another rank, which finds deadlocks (``wait_graph``).  A rank in an
operation that another rank has entered too does not wait for it: it may be unpickling, adding, or
receiving a large array.
"""
from __future__ import annotations

from typing import NamedTuple, TypeAlias

from chainermn._diagnostics import flight_recorder
from chainermn._diagnostics.flight_recorder import FlightRecord, Key, MessageRecord, creations
from chainermn._diagnostics.world_ranks import WorldRanks
from chainermn._process import runtime

Counts: TypeAlias = dict[tuple[int, int], int]  # messages by peer and tag


class Shutdown(runtime.Part):
    """How far this rank is in the shutdown."""

    def __init__(self) -> None:
        #: The communicator whose shutdown exchange this rank is in.
        self.ending: FlightRecord | None = None
        #: Whether this rank enters no more shutdown exchanges.
        self.may_exit = False


def shutdown() -> Shutdown:
    """Return how far this rank is in the shutdown."""
    return runtime.get(Shutdown)


class Progress(NamedTuple):
    """The operations that a rank has entered, and its messages."""

    entered: dict[Key, int]
    creations: dict[WorldRanks, int]  # of communicators, by ranks
    sent: dict[Key, Counts]
    received: dict[Key, Counts]
    receiving: dict[Key, Counts]  # messages whose data is still arriving

    @classmethod
    def own(cls) -> Progress:
        """Return the progress of this rank."""
        everything = flight_recorder.everything()
        messages = {calls.key: calls for calls in everything if isinstance(calls, MessageRecord)}
        return cls({calls.key: calls.entered for calls in everything},
                   dict(creations()),
                   {key: dict(calls.sent) for key, calls in messages.items()},
                   {key: dict(calls.received) for key, calls in messages.items()},
                   {key: {which: n for which, n in list(calls.receiving.items()) if n}
                    for key, calls in messages.items()})
