"""The parts of a message between two ranks: a first part, and payloads that do not fit into it.

The first part consists of an optional mark, a header, and small data: an array, the headers of
arrays, or an object.
"""
from __future__ import annotations

import functools
import pickle
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chainermn._collectives.nonblocking import Receive, Receives
from chainermn._operations import message_header
from chainermn._operations.message_header import IN_MESSAGE, Kind, MessageHeader
from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers
from chainermn._types import Array

_MARK = struct.Struct('=Bq?H')  # kind, number, needs_gradient, length of the text
_MAX_TEXT = 500

#: Largest payload, in bytes, that is sent with its header.
INLINE = 8192
MAX_SIZE = _MARK.size + _MAX_TEXT + message_header.MAX_SIZE + INLINE

#: The first byte of a pickle. A small object is sent without a header. Headers start with a kind,
#: which is always smaller than this byte.
PICKLE = pickle.PROTO[0]
_OBJECT = MessageHeader(Kind.OBJECT)  # the header of a small object
assert max(Kind) < PICKLE


class Mark(NamedTuple):
    """The mark of a message of chainermn.functions: an activation or a gradient."""

    kind: Kind  # ACTIVATION or GRADIENT
    number: int  # number of the activation
    needs_gradient: bool
    text: str  # the call of the sender, for errors

    def packed(self) -> bytes:
        text = self.text.encode()[:_MAX_TEXT]
        return _MARK.pack(self.kind, self.number, self.needs_gradient, len(text)) + text

    @classmethod
    def unpack(cls, message: memoryview) -> tuple[Mark, memoryview]:
        """Read a mark at the beginning of a message; return the mark and the rest."""
        kind, number, needs_gradient, length = _MARK.unpack_from(message)
        end = _MARK.size + length
        text = bytes(message[_MARK.size:end]).decode(errors='replace')
        return cls(Kind(kind), number, needs_gradient, text), message[end:]


def unexpected(rank: int, mark: Mark, source: int, call: str) -> ValueError:
    """Return the error for a gradient that was received instead of data, or vice versa.

    Args:
        rank: The rank that received the message.
        mark: The mark of the message.
        source: The sender.
        call: The call that received the message.
    """
    got, expected = ('a gradient', 'data') if mark.kind is Kind.GRADIENT else ('data', 'a gradient')
    calls = {rank: call, source: mark.text}
    return ValueError('\n'.join([
        f'chainermn.functions: rank {rank} got {got} from rank {source} where it expected '
        f'{expected}', *(f'  rank {each}: {text}' for each, text in sorted(calls.items())),
        'Each send needs a recv on the other rank. If a Variable is sent, both ranks have to run '
        'backward through it; send an array (x.array) if no gradient is needed.']))


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
    """Split the first part of a message into its fields."""
    body = memoryview(message)[:None if status is None else status.Get_count()]
    kind, mark = message[0], None
    if kind == PICKLE:
        return FirstPart(None, _OBJECT, body)
    if kind in (Kind.ACTIVATION, Kind.GRADIENT):
        mark, body = Mark.unpack(body)
    return FirstPart(mark, *message_header.read(body))


@functools.lru_cache(maxsize=4096)
def plain_array_in(head: bytes) -> tuple[tuple[int, ...], np.dtype] | None:
    """Return the shape and dtype of the host array after a header; ``None`` for other messages."""
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
    """Return the data of arrays; with ``copies``, large data does not share memory with them."""
    found = [array_buffers.raw(array_buffers.to_buffer(x)) for x in arrays]
    if not copies:
        return found
    return [data if is_inline(data) or _is_staged(x, data) else array_buffers.copied(data)
            for x, data in zip(arrays, found, strict=True)]


def of_tuple(arrays: Sequence[Array], data: Sequence[Array], number: int
             ) -> tuple[bytes, list[Array | bytes]]:
    """Return the first part of a message with several arrays, and its other parts.

    Headers and small arrays are sent in the first part as long as they fit, the rest one by one.
    """
    together, n_together = b'', 0
    rest: list[Array | bytes] = []
    for n, (x, payload) in enumerate(zip(arrays, data, strict=True)):
        is_small = is_inline(payload)
        part = head(x) + payload.tobytes() if is_small else head(x, number)
        if n == n_together and len(together) + len(part) <= INLINE:
            together += part
            n_together += 1
        else:
            rest.append(part)
        if not is_small:
            rest.append(payload)
    return message_header.of_tuple(len(arrays), n_together, number) + together, rest


def is_inline(payload: Array) -> bool:
    """Return whether data is sent with its header."""
    return payload.nbytes <= INLINE and not array_buffers.on_device(payload)


def _is_staged(x: Array, payload: Array) -> bool:
    """Return whether a payload is a host copy of an array on a device."""
    return array_buffers.on_device(x) and not array_buffers.on_device(payload)
