"""Small host arrays, which are sent together with the signature of their call."""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from chainermn._collectives.context import Context
from chainermn._consistency.signature_exchange import Data
from chainermn._operations.call_signature import CODES, MAX_INLINE_DIMS, SIZE, unpack
from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers
from chainermn._transport.base import on_this_rank
from chainermn._transport.elementwise import combined
from chainermn._transport.mpi_transport import mpi_op
from chainermn._types import Array


def is_inline(context: Context, array: Array) -> bool:
    """Return whether an array is sent with the signature of its call; empty arrays are not."""
    return (0 < array.nbytes <= context.check.capacity and array.ndim <= MAX_INLINE_DIMS
            and not array_buffers.on_device(array))


def inline_data(context: Context, array: Array) -> bytes:
    """Return the data of an array to append to its signature; empty if it is sent separately."""
    return array.tobytes() if is_inline(context, array) else b''


def inline_stack(context: Context, xs: Array | Sequence[Array]
                 ) -> tuple[tuple[int, ...], np.dtype, bytes] | None:
    """Return the shape, the dtype and the data, to append to a signature, of one array per rank.

    Returns:
        ``None`` if the arrays are invalid, differ in shape or dtype, or are sent separately.
    """
    if type(xs) not in (np.ndarray, tuple, list) or (
            getattr(xs, 'shape', True) == () or len(xs) != context.size):
        return None
    first = xs[0]
    if type(first) is not np.ndarray:
        return None
    shape, dtype = first.shape, first.dtype
    if dtype not in CODES or len(shape) > MAX_INLINE_DIMS or not (
            0 < first.nbytes * context.size <= context.check.capacity):
        return None
    if type(xs) is np.ndarray:
        return shape, dtype, xs.tobytes()
    for x in xs:
        if type(x) is not np.ndarray or x.shape != shape or x.dtype != dtype:
            return None
    return shape, dtype, b''.join([x.tobytes() for x in xs])


def received(context: Context, messages: Sequence[Data], signature: bytes, local: Array,
             index: int = 0) -> tuple[Array, ...]:
    """Return the array that each rank sent, or one of the arrays if each rank sent several.

    Args:
        context: The context of the communicator.
        messages: The signature of each rank, with its data appended.
        signature: The signature of this rank.
        local: The array of this rank, which is copied.
        index: The index of the array among the arrays of a rank, which have the same shape.
    """
    shape, dtype, start = local.shape, local.dtype, SIZE + index * local.nbytes
    arrays = []
    for rank, message in enumerate(messages):
        if rank == context.rank:
            arrays.append(local.copy())
        elif message.startswith(signature):  # the shape is the same
            arrays.append(np.ndarray(shape, dtype, message, start))
        else:
            arrays.append(array_of(message, index))
    return tuple(arrays)


def has_data(messages: Sequence[Data]) -> bool:
    """Return whether data is appended to the signatures of all ranks."""
    return min(map(len, messages)) > SIZE


def array_of(message: Data, index: int = 0) -> Array:
    """Return the array appended to a signature, or one of several arrays of the same shape."""
    signature = unpack(message)
    shape, dtype = signature.shape, signature.dtype
    return np.ndarray(shape, dtype, message, SIZE + index * dtype.itemsize * math.prod(shape))


def sum_of(blocks: Sequence[Data], shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Sum the arrays of all ranks in rank order. MPI must support the dtype."""
    y, datatype = bytearray(blocks[0]), _datatype(dtype)
    total, add = (y, datatype), MPI.SUM.Reduce_local
    for block in blocks[1:]:
        add((block, datatype), total)
    return np.ndarray(shape, dtype, y)


def reduced(blocks: Sequence[Data], op: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Reduce the arrays of all ranks in rank order."""
    def combine(flat: Array, op: str) -> Array:
        first, *others = flat.reshape(len(blocks), -1)
        y = first.copy()
        for other in others:
            mpi_op(y.dtype, op).Reduce_local(other, y)
        return y

    return combined(
        np.frombuffer(b''.join(blocks), dtype), op, on_this_rank, combine).reshape(shape)


@functools.cache
def _datatype(dtype: np.dtype) -> MPI.Datatype:
    # Cache by dtype rather than by character code: several codes, such as 'l' and 'q', are the
    # same dtype on most platforms.
    return MPI.Datatype.fromcode(dtype.char)
