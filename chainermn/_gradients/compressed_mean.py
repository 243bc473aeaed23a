"""Means of compressed arrays: only the wires of a compressor travel, and all ranks get equal bits.

Where one element is on the wire for each value, each rank averages one slice for all, and a rank
sends two wires however many ranks there are.  Other wires go to all ranks as they are, and each
rank averages everything in the order of the ranks.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

from chainermn._gradients import compressors
from chainermn._transport import array_buffers
from chainermn._transport.nccl.connection import NcclGroup
from chainermn._transport.packed_arrays import Pieces


def wires(compressor: Any, buffers: Sequence[Any], name: str) -> list[Any]:
    """Compresses the flat buffers of one call; ``name`` is equal for equal parameters."""
    found = []
    for n, buffer in enumerate(buffers):
        wire = array_buffers.checked(compressor.compress(buffer, f'{name}.{n}'))
        if wire.ndim != 1 or (_is_elementwise(compressor) and wire.shape != buffer.shape):
            raise ValueError(f'compressor {compressors.describe(compressor)} made shape '
                             f'{wire.shape} of {buffer.shape}; what it returns has to be flat, '
                             'and of the same length if it is elementwise')
        found.append(wire)
    return found


def describe(found: Sequence[Any]) -> dict[str, str]:
    """What of the wires has to be equal on all ranks."""
    return {f'wire {n}': f'{wire.dtype} {wire.shape}' for n, wire in enumerate(found)}


def mean(mpi_comm: Any, compressor: Any, wire: Any, size: int, dtype: Any) -> Any:
    """Returns the mean of what the ranks compressed, by MPI, as a flat array."""
    if not _is_elementwise(compressor):
        shapes = [wire.shape] * mpi_comm.size
        received = Pieces(shapes, wire.dtype, array_buffers.on_device(wire))
        mpi_comm.Allgatherv(array_buffers.raw(array_buffers.to_buffer(wire)), received.spec)
        return _mean(compressor, received.arrays(), size, dtype)
    device = array_buffers.on_device(wire)
    starts = [size * rank // mpi_comm.size for rank in range(mpi_comm.size + 1)]
    slices = [(end - start,) for start, end in itertools.pairwise(starts)]
    mine = slices[mpi_comm.rank]
    sent = Pieces(slices, wire.dtype, False, array_buffers.to_buffer(wire))
    received = Pieces([mine] * mpi_comm.size, wire.dtype, device)
    mpi_comm.Alltoallv(sent.spec, received.spec)
    averaged = compressor.compress(_mean(compressor, received.arrays(), mine[0], dtype), None)
    whole = Pieces([(size,)], wire.dtype, device)
    mpi_comm.Allgatherv(array_buffers.raw(array_buffers.to_buffer(averaged)), Pieces(
        slices, wire.dtype, False, whole.buffer).spec)
    return compressor.decompress(whole.arrays()[0], size, dtype)


def mean_by_nccl(nccl: NcclGroup, compressor: Any, wire: Any, size: int, dtype: Any) -> Any:
    """Returns the mean of what the ranks compressed, by NCCL, as a flat array.

    NCCL adds float16 and bfloat16 itself; each sum on the way is rounded.  What it adds has to be
    divided by the number of ranks already.
    """
    if is_gathered(compressor):
        xp = chainer.backend.get_array_module(wire)
        received = xp.empty((nccl.size, wire.size), wire.dtype)
        nccl.all_gather(wire, received)
        return _mean(compressor, received, size, dtype)
    nccl.all_reduce(wire, dtype=compressor.wire_dtype)
    return compressor.decompress(wire, size, dtype)


def is_gathered(compressor: Any) -> bool:
    """Whether by NCCL each rank receives the wires of all, since they cannot be added."""
    return compressor is not None and getattr(compressor, 'wire_dtype', None) is None


def _is_elementwise(compressor: Any) -> bool:
    return getattr(compressor, 'elementwise', False)


def _mean(compressor: Any, received: Sequence[Any], size: int, dtype: Any) -> Any:
    total = chainer.backend.get_array_module(received[0]).zeros(size, dtype)
    with np.errstate(over='ignore', invalid='ignore'):  # what is not finite is not for us to judge
        for wire in received:
            total += compressor.decompress(wire, size, dtype)
        total *= total.dtype.type(1 / len(received))
    return total
