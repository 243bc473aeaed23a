"""Reserved tags of messages between the ranks of a communicator."""
from __future__ import annotations

from typing import NamedTuple

from chainermn._process.mpi import MPI


class Tags(NamedTuple):
    """The largest tags; smaller tags number the payloads of messages."""

    collective: int  # for objects in collectives
    check: int  # for the consistency check
    arrays: int  # for arrays that a transport sends to each rank


def reserved() -> Tags:
    """Return the reserved tags."""
    largest = largest_tag()
    return Tags(largest, largest - 1, largest - 2)


def largest_tag() -> int:
    """Return the largest valid tag. Some MPI libraries define it only for COMM_WORLD."""
    tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    assert isinstance(tag, int)
    return tag
