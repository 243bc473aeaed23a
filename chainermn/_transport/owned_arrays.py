"""Arrays that belong to ranks: averaged for their owners, or copied to all ranks, by MPI."""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from chainermn._consistency import tags
from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers, owned_parts, packing
from chainermn._transport.array_list import ArrayList
from chainermn._transport.base import Group
from chainermn._transport.topology import Topology
from chainermn._types import Array

#: The size of a chunk in bytes: large enough to amortize latency.
CHUNK = 8 * 2**20


def sends_least(topology: Topology) -> bool:
    """Return whether direct messages between all ranks minimize the traffic between nodes.

    With several nodes and several ranks per node, MPI's collectives send less, because they first
    reduce and broadcast within each node.
    """
    return topology.inter_size in (1, len(topology.nodes))


def average(mpi_comm: MPI.Intracomm, group: Group, arrays: ArrayList, owners: tuple[int, ...]
            ) -> None:
    """Average each array for its owner; see :meth:`MpiTransport.mean_for_owners`."""
    for chunk in _chunks(mpi_comm.size, arrays, owners):
        _reduce(mpi_comm, group, chunk)


def copy(group: Group, arrays: ArrayList, owners: tuple[int, ...]) -> None:
    """Copy each array from its owner to all ranks; see :meth:`MpiTransport.copy_arrays`."""
    for chunk in _chunks(group.tagged_comm.size, arrays, owners):
        _gather(group, chunk)


def _chunks(size: int, arrays: ArrayList, owners: tuple[int, ...]) -> Iterator[list[list[Array]]]:
    """Yield chunks of arrays of one dtype, each as the parts of each rank.

    Once the iterator is exhausted, changes to the parts are also in arrays that are not contiguous.
    """
    for group, of_group in arrays.by_owner(owners):
        length = max(CHUNK // group[0].dtype.itemsize, 2 * size)
        flat = [array.reshape(-1) for array in group]
        for chunk in owned_parts.assigned(
                tuple(array.size for array in flat), tuple(of_group), tuple(range(size)), length):
            yield [[flat[part.array][part.start:part.stop] for part in parts] for parts in chunk]
        for array, copy in zip(group, flat, strict=True):
            if not array.flags.c_contiguous:
                array[...] = copy.reshape(array.shape)


def _counts(chunk: Sequence[Sequence[Array]]) -> list[int]:
    """Return the number of elements for each rank."""
    return [sum(part.size for part in of_rank) for of_rank in chunk]


def _reduce(mpi_comm: MPI.Intracomm, group: Group, chunk: Sequence[Sequence[Array]]) -> None:
    """Average the parts of each rank for that rank."""
    parts, own = [*itertools.chain(*chunk)], chunk[mpi_comm.rank]
    counts = _counts(chunk)
    dtype, device = array_buffers.summed_in(parts[0].dtype), array_buffers.on_device(parts[0])
    sent, y = group.prepared(sum(counts) * dtype.itemsize, lambda: (
        array_buffers.to_buffer(packing.pack(parts, dtype, group.batched_copy)),
        array_buffers.new_buffer((counts[mpi_comm.rank],), dtype, device)))
    mpi_comm.Reduce_scatter(sent, y, counts)
    if own:
        packing.unpack(array_buffers.from_buffer(y, y.shape, device), own, 1 / mpi_comm.size,
                       group.batched_copy)


def _gather(group: Group, chunk: Sequence[Sequence[Array]]) -> None:
    """Copy the parts from each rank to all ranks."""
    comm, tag = group.tagged_comm, tags.reserved().arrays
    rank, size = comm.rank, comm.size
    own, (some, *_) = chunk[rank], itertools.chain(*chunk)
    counts = _counts(chunk)
    starts = [*itertools.accumulate(counts, initial=0)]
    places = [slice(*ends) for ends in itertools.pairwise(starts)]
    device = array_buffers.on_device(some)

    def pack() -> Array:
        buffer = array_buffers.new_buffer((starts[-1],), some.dtype, device)
        if own:
            buffer[places[rank]] = array_buffers.to_buffer(packing.pack(own))
        return array_buffers.to_buffer(buffer)

    buffer = group.prepared(starts[-1] * some.dtype.itemsize, pack)
    # MPICH's Allgatherv takes three times as long over TCP.
    data = {other: array_buffers.raw(buffer[place]) for other, place in enumerate(places)
            if counts[other]}
    others = [(rank + shift) % size for shift in range(1, size)]
    requests = [comm.Irecv(data[other], other, tag) for other in others if other in data]
    if own:
        requests += [comm.Isend(data[rank], other, tag) for other in others]
    MPI.Request.Waitall(requests)
    complete = array_buffers.from_buffer(buffer, buffer.shape, device)
    for other, parts in enumerate(chunk):
        if parts and other != rank:
            packing.unpack(complete[places[other]], parts)
