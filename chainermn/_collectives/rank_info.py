"""The information that ranks exchange, in one collective, when they create a communicator."""
from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Iterator
from typing import NamedTuple

from chainermn._consistency import mismatch
from chainermn._consistency.mismatch import RemoteError
from chainermn._diagnostics import lifecycle
from chainermn._diagnostics.flight_recorder import Key, world_ranks
from chainermn._diagnostics.node_monitor import Registration
from chainermn._process import runtime
from chainermn._process.mpi import MPI
from chainermn._timeline import recorder
from chainermn._transport import lifetime, topology
from chainermn._transport.topology import Place

#: Bytes per rank that are gathered in one operation: the length of a pickle, then the pickle.
_BLOCK = 1024
_LENGTH = struct.Struct('=I')
_ROOM = _BLOCK - _LENGTH.size


class Arguments(NamedTuple):
    """The arguments that a rank passes to create_communicator."""

    call: str
    failure: RemoteError | None  # why the call is invalid
    no_nccl_reason: str  # why 'auto' cannot use NCCL; '' if it can
    has_torch: bool  # whether PyTorch's kernels compute for Chainer
    rounding: str  # how updates round; '' if Chainer computes them


class RankInfo(NamedTuple):
    """The information that a rank sends to the others."""

    place: Place
    has_timeline: bool  # whether the rank records a timeline
    registration: Registration | None
    unreferenced: set[Key]
    arguments: Arguments | None


class _Gathered(runtime.ProcessState):
    """The information that create_communicator has gathered for the communicator it creates."""

    def __init__(self) -> None:
        self.mpi_comm: MPI.Intracomm | None = None
        self.ranks: list[RankInfo] = []


def gather(mpi_comm: MPI.Intracomm, arguments: Arguments | None = None) -> list[RankInfo]:
    """Return the information of each rank. Collective: every rank calls it.

    Afterwards, the ranks can report failures and notice when another rank has exited.

    Args:
        mpi_comm: The MPI communicator of the ranks that create a communicator.
        arguments: The arguments that this rank passes to create_communicator; ``None`` if it
            instantiates a communicator class instead.

    Raises:
        CollectiveMismatchError: On all ranks, if only some of them instantiate a class.
    """
    registration = lifecycle.prepare(mpi_comm)
    ranks = _allgather(mpi_comm, RankInfo(
        topology.here(), recorder.is_on(), registration,
        lifetime.unreferenced(world_ranks(mpi_comm)), arguments))
    if registration is not None:
        lifecycle.start(mpi_comm, [each.place.host for each in ranks],
                        [each.registration for each in ranks if each.registration is not None])
    calls = ['a communicator class' if each.arguments is None else each.arguments.call
             for each in ranks]
    if len({each.arguments is None for each in ranks}) > 1:
        raise mismatch.calls_differ_error(calls)
    return ranks


def _allgather(mpi_comm: MPI.Intracomm, info: RankInfo) -> list[RankInfo]:
    """Return the information of each rank, using one collective, or three if a text is long.

    mpi4py's ``allgather`` would always gather the lengths first.
    """
    data = pickle.dumps(info)
    received = bytearray(_BLOCK * mpi_comm.size)
    mpi_comm.Allgather((_LENGTH.pack(len(data)) + data[:_ROOM]).ljust(_BLOCK, b'\0'), received)
    starts = range(0, len(received), _BLOCK)
    if max(_LENGTH.unpack_from(received, start)[0] for start in starts) > _ROOM:
        return mpi_comm.allgather(info)
    return [pickle.loads(received[start + _LENGTH.size:start + _BLOCK]) for start in starts]


@contextlib.contextmanager
def gathered(mpi_comm: MPI.Intracomm, ranks: list[RankInfo]) -> Iterator[None]:
    """Make :func:`of_ranks` return this information once, without communicating."""
    state = runtime.get(_Gathered)
    state.mpi_comm, state.ranks = mpi_comm, ranks
    try:
        yield
    finally:
        state.mpi_comm = None


def of_ranks(mpi_comm: MPI.Intracomm) -> list[RankInfo]:
    """Return the information of each rank when a communicator is created.

    Collective: every rank calls it.
    """
    state = runtime.get(_Gathered)
    if state.mpi_comm is not mpi_comm:
        return gather(mpi_comm)
    state.mpi_comm = None
    return state.ranks
