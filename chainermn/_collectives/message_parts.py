"""The parts of a message between two ranks: the first one, then payloads that do not fit into it.

The first part has an optional mark, a header, and small data: an array, heads of arrays, an object.
"""
from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chainermn._collectives import marks
from chainermn._collectives.marks import Mark
from chainermn._collectives.nonblocking import Receive, Receives
from chainermn._operations import message_header
from chainermn._operations.message_header import IN_MESSAGE, Kind, MessageHeader
from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers
from chainermn._types import Array

#: Largest payload, in bytes, that is sent with its header.
INLINE = 8192
MAX_SIZE = marks.MAX_SIZE + message_header.MAX_SIZE + INLINE

#: The first byte of a pickle.  A small object is sent without a header, which starts with its kind.
PICKLE = pickle.PROTO[0]
_OBJECT = MessageHeader(Kind.OBJECT)  # of a small object
assert max(Kind) < PICKLE


class FirstPart(NamedTuple):
    """The first part of a message."""

    mark: Mark | None
    header: MessageHeader
    body: memoryview


def receive(mpi_comm: MPI.Intracomm, source: int, tag: int, status: MPI.Status
            ) -> Receives[FirstPart]:
    """Receive the first part of the next message."""
    message = bytearray(MAX_SIZE)
    yield Receive(mpi_comm, message, source, tag, status)
    return split(message, status)


def split(message: bytearray, status: MPI.Status | None = None) -> FirstPart:
    """Return the contents of a first part."""
    body = memoryview(message)[:None if status is None else status.Get_count()]
    kind, mark = message[0], None
    if kind == PICKLE:
        return FirstPart(None, _OBJECT, body)
    if kind in (Kind.ACTIVATION, Kind.GRADIENT):
        mark, body = Mark.unpack(body)
    return FirstPart(mark, *message_header.read(body))


@functools.lru_cache(maxsize=4096)
def array_with(head: bytes) -> tuple[tuple[int, ...], np.dtype] | None:
    """Return shape and dtype of a host array that follows its header; for others ``None``."""
    if head[0] != Kind.ARRAY:
        return None
    header, n_more = message_header.unpack(head)
    if n_more or header.device or header.payload != IN_MESSAGE:
        return None
    return header.shape, header.dtype


def head(x: Array, payload: int = IN_MESSAGE) -> bytes:
    """Return the header of an array."""
    return message_header.of_array(x.shape, x.dtype, payload, array_buffers.on_device(x))


def payloads(arrays: Sequence[Array], copies: bool) -> list[Array]:
    """Return the data of arrays; with ``copies``, large ones are not that of the arrays itself."""
    found = [array_buffers.raw(array_buffers.to_buffer(x)) for x in arrays]
    if not copies:
        return found
    return [data if is_inline(data) or _is_staged(x, data) else array_buffers.copied(data)
            for x, data in zip(arrays, found, strict=True)]


def of_tuple(arrays: Sequence[Array], data: Sequence[Array], number: int
             ) -> tuple[bytes, list[Array | bytes]]:
    """Return the first part of a message with several arrays, and the others.

    Heads and small arrays are sent together as long as they fit, the others one by one.
    """
    together, n_together = b'', 0
    rest: list[Array | bytes] = []
    for n, (x, payload) in enumerate(zip(arrays, data, strict=True)):
        part = head(x) + payload.tobytes() if is_inline(payload) else head(x, number)
        if n == n_together and len(together) + len(part) <= INLINE:
            together += part
            n_together += 1
        else:
            rest.append(part)
        if not is_inline(payload):
            rest.append(payload)
    return message_header.of_tuple(len(arrays), n_together, number) + together, rest


def is_inline(payload: Array) -> bool:
    """Return whether data is sent with its header."""
    return payload.nbytes <= INLINE and not array_buffers.on_device(payload)


def _is_staged(x: Array, payload: Array) -> bool:
    """Whether a payload is a copy on the host of an array on a device."""
    return array_buffers.on_device(x) and not array_buffers.on_device(payload)
