"""The header of a point-to-point message: a fixed-size description of the data that follows."""
from __future__ import annotations

import enum
import functools
import struct
from typing import NamedTuple

import numpy as np

from chainermn._operations.call_signature import CODES, DTYPES, MAX_INLINE_DIMS, NO_DTYPE


class Kind(enum.IntEnum):
    """The type of the content of a message, stored in its first byte."""

    ARRAY = 0
    TUPLE = 1  # a tuple of arrays: the first ones are in the message, the others follow
    OBJECT = 2
    ERROR = 3  # the sender failed and sends no data
    ACTIVATION = 4  # sent by chainermn.functions; the header of the data follows
    GRADIENT = 5  # like ACTIVATION, in the backward pass


#: Stands for the number of a payload if the data is in the message itself.
IN_MESSAGE = -1

# kind, dtype, device, dimensions, number of the payload, number of arrays, shape; the size of the
# header keeps the data aligned
_STRUCT = struct.Struct(f'=BB?Biq{MAX_INLINE_DIMS}q')
_PADDING = tuple((0,) * (MAX_INLINE_DIMS - n) for n in range(MAX_INLINE_DIMS + 1))
SIZE = _STRUCT.size
#: The maximum size of an array's header. A shape with more than ``MAX_INLINE_DIMS`` dimensions (up
#: to 64) follows the fixed part.
MAX_SIZE = SIZE + 64 * 8


class MessageHeader(NamedTuple):
    """The unpacked header of a message.

    Attributes:
        kind: The type of the content.
        payload: The number of the payload, which is its tag on another MPI communicator;
            ``IN_MESSAGE`` if the data follows this header.
        n_arrays: The number of arrays in a tuple.
        code: The number of the dtype of an array.
        device: Whether an array is on a device.
        shape: The shape of an array; for a tuple, ``(n_together,)``.
    """

    kind: Kind
    payload: int = IN_MESSAGE
    n_arrays: int = 0
    code: int = NO_DTYPE
    device: bool = False
    shape: tuple[int, ...] = ()

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.code]

    @property
    def n_together(self) -> int:
        """The number of arrays in a tuple that are described in the message itself."""
        return self.shape[0]

    @property
    def description(self) -> str:
        """The dtype and shape of the array as text; ``''`` if it is not an array."""
        if self.code == NO_DTYPE:
            return ''
        return f'{self.dtype} {self.shape}' if self.shape else str(self.dtype)


@functools.lru_cache(maxsize=4096)
def of_array(shape: tuple[int, ...], dtype: np.dtype, payload: int = IN_MESSAGE,
             device: bool = False) -> bytes:
    """Return the header of an array; a shape with too many dimensions follows it."""
    ndim = len(shape)
    short, long = (shape, ()) if ndim <= MAX_INLINE_DIMS else ((), shape)
    return _STRUCT.pack(Kind.ARRAY, CODES[dtype], device, ndim, payload, 0, *short,
                        *_PADDING[len(short)]) + struct.pack(f'={len(long)}q', *long)


def of_tuple(n_arrays: int, n_together: int, payload: int) -> bytes:
    """Return the header of a tuple of arrays."""
    return _STRUCT.pack(Kind.TUPLE, NO_DTYPE, False, 1, payload, n_arrays, n_together, *_PADDING[1])


def of_object(payload: int) -> bytes:
    """Return the header of an object."""
    return _STRUCT.pack(Kind.OBJECT, NO_DTYPE, False, 0, payload, 0, *_PADDING[0])


#: The header of an error.
ERROR = _STRUCT.pack(Kind.ERROR, NO_DTYPE, False, 0, IN_MESSAGE, 0, *_PADDING[0])


def read(message: bytes | memoryview) -> tuple[MessageHeader, memoryview]:
    """Return the header at the beginning of a message, and the data after it."""
    body = memoryview(message)
    header, n_more = unpack(bytes(body[:SIZE]))
    body = body[SIZE:]
    if not n_more:
        return header, body
    shape = struct.unpack_from(f'={n_more}q', body)
    return header._replace(shape=shape), body[8 * n_more:]


def shapes(headers: bytes | bytearray) -> list[tuple[int, ...]]:
    """Return the shapes in the headers of several arrays."""
    return [unpack(bytes(headers[start:start + SIZE]))[0].shape
            for start in range(0, len(headers), SIZE)]


@functools.lru_cache(maxsize=4096)
def unpack(data: bytes) -> tuple[MessageHeader, int]:
    """Return the header, and the number of dimensions that follow it."""
    kind, code, device, ndim, payload, n_arrays, *shape = _STRUCT.unpack(data)
    is_short = ndim <= MAX_INLINE_DIMS
    return MessageHeader(Kind(kind), payload, n_arrays, code, device,
                         tuple(shape[:ndim]) if is_short else ()), 0 if is_short else ndim
