"""The header: what one rank says of its call, in a few fixed bytes."""
from __future__ import annotations

import functools
import hashlib
import struct
from typing import Any, NamedTuple

import numpy as np

DTYPES = tuple(np.dtype(name) for name in (
    'bool', 'int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64',
    'float16', 'float32', 'float64', 'complex64', 'complex128'))
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
NO_DTYPE = 255

OPS = ('', 'sum', 'prod', 'max', 'min')

#: How much of the call has to be equal on all ranks: the operation with its root and op; the
#: dtype as well; the whole call with its shape.
CALL, DTYPE, SHAPE = 1, 2, 3

#: What a rank says that calls nothing any more.
END = 'end of the program'

#: The operations with what has to be equal.  The order is free: all ranks run the same version.
EQUAL = {
    'refused': CALL,
    'bcast': CALL, 'gather': DTYPE, 'allgather': DTYPE, 'alltoall': DTYPE, 'scatter': CALL,
    'allreduce': SHAPE, 'allreduce_many': SHAPE, 'multi_node_mean': SHAPE,
    'reduce': SHAPE, 'reduce_scatter': SHAPE,
    'bcast_obj': CALL, 'gather_obj': CALL, 'allgather_obj': CALL, 'scatter_obj': CALL,
    'allreduce_obj': CALL,
    'bcast_data': SHAPE, 'multi_node_mean_grad': SHAPE, 'join': CALL,
    'split': CALL, 'new_group': SHAPE, 'barrier': CALL, 'serve': CALL, 'mean_queue': CALL,
    'finalize': CALL, END: CALL,
    # Point to point: these travel ahead of the payload and are compared by the receiver.
    'send': CALL, 'send_tuple': CALL, 'send_obj': CALL,
    # Ahead of such a header, on messages of chainermn.functions.
    'activation': CALL, 'gradient': CALL,
}
VERBS = tuple(EQUAL)
_NUMBER = {verb: number for number, verb in enumerate(VERBS)}

MAX_INLINE_DIMS = 8
# verb, op, update, root, dtype, refused, device, dimensions, number, shape
_STRUCT = struct.Struct(f'=BBHiBBBBxxxxq{MAX_INLINE_DIMS}q')
_PADDING = tuple((0,) * (MAX_INLINE_DIMS - n) for n in range(MAX_INLINE_DIMS + 1))
SIZE = _STRUCT.size
MAX_UPDATE = 2**16 - 1
_NUMBER_BETWEEN = struct.Struct(f'=16sq{8 * MAX_INLINE_DIMS}s')


class Header(NamedTuple):
    """What one rank says of its call.

    ``update`` counts the updates that an optimizer has begun since its last exchange; it is 0 if no
    optimizer calls.  ``number`` is whatever else has to be equal or known: a digest of shapes or
    parameters, a length in bytes.  ``ndim`` may exceed ``MAX_INLINE_DIMS``; then ``shape`` is empty
    and ``number`` its digest.
    """

    verb: str
    op: str
    update: int
    root: int
    code: int
    refused: bool
    device: bool
    ndim: int
    number: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.code]

    def key(self, equal: int) -> tuple[Any, ...]:
        """The part of the call that has to be equal on all ranks."""
        key: tuple[Any, ...] = (self.verb, self.root, self.op, self.update)
        if equal >= DTYPE:
            key += (self.code,)
        if equal >= SHAPE:
            key += (self.ndim, self.shape, self.number)
        return key

    def __str__(self) -> str:
        words = [self.verb]
        if self.code != NO_DTYPE:
            words.append(str(self.dtype))
            if EQUAL[self.verb] != CALL or self.shape:
                words.append(str(self.shape) if self.ndim <= MAX_INLINE_DIMS else
                             f'with {self.ndim} dimensions')
        if self.op:
            words.append(f'op={self.op!r}')
        if self.root >= 0:
            words.append(f'root={self.root}')
        return ' '.join(words)


@functools.lru_cache(maxsize=4096)
def pack(verb: str, shape: tuple[int, ...] = (), dtype: np.dtype | None = None, root: int = -1,
         op: str = '', device: bool = False, number: int = 0, refused: bool = False,
         update: int = 0) -> bytes:
    """Returns the header as ``SIZE`` bytes."""
    ndim = len(shape)
    if ndim > MAX_INLINE_DIMS:
        shape, number = (), digest(shape)
    return _STRUCT.pack(_NUMBER[verb], OPS.index(op), update, root,
                        NO_DTYPE if dtype is None else CODES[dtype], refused, device, ndim, number,
                        *shape, *_PADDING[len(shape)])


def unpack(data: Any, offset: int = 0) -> Header:
    """Reads a header from a buffer."""
    return _unpack(bytes(memoryview(data)[offset:offset + SIZE]))


def numbers(headers: Any, like: bytes) -> list[int] | None:
    """The numbers in a buffer of headers; None if one differs from ``like`` in anything else."""
    first, _, last = _NUMBER_BETWEEN.unpack(like)
    parts = [*_NUMBER_BETWEEN.iter_unpack(headers)]
    found = [number for begin, number, end in parts if begin == first and end == last]
    return found if len(found) == len(parts) else None


@functools.lru_cache(maxsize=4096)
def _unpack(data: bytes) -> Header:
    verb, op, update, root, code, refused, device, ndim, number, *shape = _STRUCT.unpack(data)
    return Header(VERBS[verb], OPS[op], update, root, code, bool(refused), bool(device), ndim,
                  number, tuple(shape[:ndim]) if ndim <= MAX_INLINE_DIMS else ())


class Described(dict[str, str]):
    """Facts that are compared often.  Its digest is computed once; so it must not change."""

    @functools.cached_property
    def digest(self) -> int:
        return digest(dict(self))


def digest(value: Any) -> int:
    """A number of 63 bits, equal on all ranks for equal values made of strings and numbers."""
    if isinstance(value, Described):
        return value.digest
    hashed = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, 'little') >> 1
