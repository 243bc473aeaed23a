"""Means of compressed arrays: only encoded arrays are sent; all ranks get bitwise identical means.

If a compressor is elementwise, each rank averages one slice. It sends about twice the size of an
encoded array, regardless of the number of ranks. Otherwise, each rank receives the encoded arrays
of all ranks and averages them in rank order.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence

import chainer
import numpy as np

from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers
from chainermn._transport.base import Codec, Compressor, Prepare, on_this_rank
from chainermn._transport.packing import PackedArrays
from chainermn._types import Array


def by_mpi(mpi_comm: MPI.Intracomm, codec: Codec, encoded: Array, size: int, dtype: np.dtype,
           prepared: Prepare = on_this_rank) -> Array:
    """Return the mean of the encoded arrays of all ranks, as a flat array.

    Collective: every rank calls it.

    Args:
        mpi_comm: The communicator.
        codec: The codec of this rank.
        encoded: The encoded array of this rank.
        size: The number of elements of the original array, and of the mean.
        dtype: The dtype of the mean.
        prepared: Function that prepares a data transfer; its error is raised on all ranks.
    """
    device = array_buffers.on_device(encoded)
    if not is_elementwise(codec.compressor):
        shapes = [encoded.shape] * mpi_comm.size
        buffer, received = prepared(encoded.nbytes * mpi_comm.size, lambda: (
            array_buffers.raw(array_buffers.to_buffer(encoded)),
            PackedArrays(shapes, encoded.dtype, device)))
        mpi_comm.Allgatherv(buffer, received.spec)
        return decoded_mean(codec, received.arrays(), size, dtype)
    starts = [size * rank // mpi_comm.size for rank in range(mpi_comm.size + 1)]
    slices = [(end - start,) for start, end in itertools.pairwise(starts)]
    mine = slices[mpi_comm.rank]
    sent, received, complete = prepared(encoded.nbytes, lambda: (
        PackedArrays(slices, encoded.dtype, False, array_buffers.to_buffer(encoded)),
        PackedArrays([mine] * mpi_comm.size, encoded.dtype, device),
        PackedArrays([(size,)], encoded.dtype, device)))
    mpi_comm.Alltoallv(sent.spec, received.spec)
    averaged = prepared(encoded.nbytes, lambda: array_buffers.to_buffer(codec.compress(
        decoded_mean(codec, received.arrays(), mine[0], dtype), None, encoded.dtype, mine[0])))
    mpi_comm.Allgatherv(array_buffers.raw(averaged), PackedArrays(
        slices, encoded.dtype, False, complete.buffer).spec)
    return codec.decompress(complete.arrays()[0], size, dtype)


def decoded_mean(codec: Codec, received: Sequence[Array], size: int, dtype: np.dtype) -> Array:
    """Return the mean of encoded arrays, added in their order."""
    total = chainer.backend.get_array_module(received[0]).zeros(size, dtype)
    with np.errstate(over='ignore', invalid='ignore'):  # gradients may overflow
        for encoded in received:
            total += codec.decompress(encoded, size, dtype)
        total *= total.dtype.type(1 / len(received))
    return total


def is_elementwise(compressor: Compressor) -> bool:
    """Return whether each value is encoded as one element, independently of the others."""
    return bool(getattr(compressor, 'elementwise', False))
