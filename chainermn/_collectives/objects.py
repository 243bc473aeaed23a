"""Object operations. Objects are pickled before the ranks compare their calls."""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from chainermn._collectives.context import Context, MpiCommunicator
from chainermn._collectives.inline_arrays import has_data
from chainermn._collectives.operation import operation
from chainermn._operations.call_signature import SIZE, pack, unpack
from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers
from chainermn._transport.elementwise import check_op
from chainermn._transport.pickling import Pickled, chunks, load
from chainermn._types import Buffer, Object

#: Largest pickle, in bytes, whose length is in the signature.
_SINGLE = 2**24

#: Largest pickle, in bytes, that ranks pad to the length of the longest one, to use one MPI call.
_SMALL = 2**13


def _extreme(elementwise: Callable[[Object, Object], Object],
             is_beyond: Callable[[Object, Object], bool], a: Object, b: Object) -> Object:
    """Return the larger or smaller object, or the one that is NaN; elementwise for arrays."""
    if getattr(a, 'ndim', 0) or getattr(b, 'ndim', 0):
        return elementwise(a, b)
    return b if is_beyond(b, a) or b != b else a


_OPS: dict[str, Callable[[Object, Object], Object]] = {
    'sum': operator.add, 'prod': operator.mul,
    'max': functools.partial(_extreme, np.maximum, operator.gt),
    'min': functools.partial(_extreme, np.minimum, operator.lt)}


@operation
def send_obj(comm: MpiCommunicator, obj: Object, dest: int, tag: int = 0) -> None:
    comm._context.messages.send_obj(obj, dest, tag)


@operation
def recv_obj(comm: MpiCommunicator, source: int, status: MPI.Status | None = None, tag: int = -1
             ) -> Object:
    # -1 means any tag. The value of MPI.ANY_TAG depends on the MPI library.
    return comm._context.messages.recv_obj(source, MPI.ANY_TAG if tag == -1 else tag, status)


@operation
def bcast_obj(comm: MpiCommunicator, obj: Object, max_buf_len: int = 256 * 1024 * 1024,
              root: int = 0) -> Object:
    context = comm._context
    root = array_buffers.checked_root(root, context.size)
    pickled = Pickled(obj) if context.rank == root else None
    number = 0 if pickled is None else _nbytes(pickled, _SINGLE)
    data = pickled.stream if pickled is not None and (
        0 < number <= context.check.capacity) else b''
    message = context.check.bcast(
        pack('bcast_obj', (), None, root, '', False, number), root, data)
    if len(message) > SIZE:
        return obj if pickled is not None else load(message[SIZE:], (), root, context.rank)
    nbytes = unpack(message).number
    lengths = [nbytes] if nbytes else context.mpi_comm.bcast(
        None if pickled is None else [part.nbytes for part in pickled.parts], root)
    parts = context.check.prepared(sum(lengths), lambda: [
        np.empty(length, np.uint8) for length in lengths
    ] if pickled is None else pickled.parts)
    for part in parts:
        for chunk in chunks(part):
            context.mpi_comm.Bcast(chunk, root)
    return obj if pickled is not None else load(parts[0], parts[1:], root, context.rank)


@operation
def gather_obj(comm: MpiCommunicator, obj: Object, root: int = 0) -> list[Object] | None:
    context = comm._context
    return _gathered(context, 'gather_obj', obj, array_buffers.checked_root(root, context.size))


@operation
def allgather_obj(comm: MpiCommunicator, obj: Object) -> list[Object]:
    return cast('list[Object]', _gathered(comm._context, 'allgather_obj', obj))


@operation
def scatter_obj(comm: MpiCommunicator, objs: Sequence[Object] | None, root: int = 0) -> Object:
    context = comm._context
    pickled: list[Pickled] = []
    root = array_buffers.checked_root(root, context.size)
    if context.rank == root:
        if objs is None or len(objs) != context.size:
            raise ValueError(f'expected one object for each of the {context.size} ranks but got '
                             f'{objs if objs is None else len(objs)}')
        pickled = [Pickled(obj) for obj in objs]
    lengths = [_nbytes(each, _SMALL) for each in pickled]
    number = max(lengths) if lengths and all(lengths) else 0
    sent = b''.join([each.stream.ljust(number) for each in pickled]) if number else b''
    message = context.check.bcast(
        pack('scatter_obj', root=root, number=number), root,
        sent if len(sent) <= context.check.capacity else b'')
    length = unpack(message).number
    if not length:
        return context.messages.exchange_objects(dict(enumerate(pickled)), [root])[0]
    if len(message) > SIZE:
        start = SIZE + length * context.rank
        received = message[start:start + length]
    else:
        received = bytearray(length)
        context.mpi_comm.Scatter(sent or None, received, root)
    return load(received, (), root, context.rank)


@operation
def allreduce_obj(comm: MpiCommunicator, obj: Object, op: str = 'sum') -> Object:
    check_op(op)
    objs = cast('list[Object]', _gathered(comm._context, 'allreduce_obj', obj, op=op))
    try:
        return functools.reduce(_OPS[op], objs)
    except TypeError as error:
        raise TypeError(f'{error}. allreduce_obj cannot combine the objects with op={op!r}; '
                        'allgather_obj returns them as a list.') from error


def _gathered(context: Context, operation: str, obj: Object, root: int = -1, op: str = ''
              ) -> list[Object] | None:
    """Return the objects of all ranks on the root, or on all ranks if there is no root."""
    pickled, is_receiver = Pickled(obj), root in (-1, context.rank)
    number = _nbytes(pickled, _SMALL)
    messages = context.check.gather(
        pack(operation, (), None, root, op, False, number),
        pickled.stream if 0 < number <= context.check.capacity else b'')
    if has_data(messages):
        if not is_receiver:
            return None
        streams: Sequence[Buffer] = [message[SIZE:] for message in messages]
    else:
        lengths = [unpack(message).number for message in messages]
        if not all(lengths):
            dests = [root] if root >= 0 else range(context.size)
            objs = context.messages.exchange_objects(dict.fromkeys(dests, pickled),
                                             range(context.size) if is_receiver else ())
            return objs if is_receiver else None
        streams = _gathered_streams(context, pickled.stream, max(lengths), root)
    if not is_receiver:
        return None
    return [load(stream, (), source, context.rank) for source, stream in enumerate(streams)]


def _gathered_streams(context: Context, stream: bytes, length: int, root: int) -> list[memoryview]:
    """Gather pickles, padded to ``length``. If there is a root, only its result is valid."""
    padded, received = stream.ljust(length), bytearray(length * context.size)
    if root < 0:
        context.mpi_comm.Allgather(padded, received)
    else:
        context.mpi_comm.Gather(padded, received if root == context.rank else None, root)
    view = memoryview(received)
    return [view[length * source:length * (source + 1)] for source in range(context.size)]


def _nbytes(pickled: Pickled, most: int) -> int:
    """Return the length of a pickle; 0 if it is longer than ``most`` or has out-of-band buffers."""
    nbytes = len(pickled.stream)
    return nbytes if nbytes <= most and not pickled.buffers else 0
