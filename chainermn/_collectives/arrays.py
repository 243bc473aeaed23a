"""Array operations without arithmetic: point-to-point, broadcast, gather, scatter, all-to-all."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from chainermn._collectives import nonblocking
from chainermn._collectives.activations import Activation
from chainermn._collectives.context import Context, MpiCommunicator
from chainermn._collectives.inline_arrays import (
    array_of,
    has_data,
    inline_data,
    inline_stack,
    received,
)
from chainermn._collectives.nonblocking import Request
from chainermn._collectives.operation import operation
from chainermn._operations import call_signature, message_header
from chainermn._operations.call_signature import SIZE, CallSignature, pack, unpack
from chainermn._operations.table import BACKWARD_OF_RECV, BACKWARD_OF_SEND, RECV, SEND
from chainermn._transport import array_buffers
from chainermn._transport.mpi_transport import MpiTransport
from chainermn._types import Array, ReceivedArrays, SameArray

_T = TypeVar('_T')

#: Ways to send the shapes of one array per rank: one common shape in the signature of the call; one
#: header per array; or pickled shapes, if a shape has too many dimensions for a header.
_HOMOGENEOUS, _SHORT, _LONG = range(3)


@operation
def send(comm: MpiCommunicator, data: Array, dest: int, tag: int) -> None:
    comm._context.messages.send(data, dest, tag)


@operation
def recv(comm: MpiCommunicator, source: int, tag: int) -> ReceivedArrays:
    return comm._context.messages.recv(source, tag)


@operation
def isend(comm: MpiCommunicator, x: Array, dest: int, tag: int = 0) -> Request[None]:
    context = comm._context
    request = context.messages.isend(x, dest, tag, context.check.caller.name)
    request._tracer = context.tracer
    return request


@operation
def irecv(comm: MpiCommunicator, source: int, tag: int = 0) -> Request[ReceivedArrays]:
    context = comm._context
    request = context.messages.irecv(source, tag, context.check.caller.name)
    request._tracer = context.tracer
    return request


@operation(SEND)
def send_activation(comm: MpiCommunicator, data: Array, dest: int, tag: int, needs_gradient: bool
                    ) -> Activation:
    context = comm._context
    return context.activations.send(
        data, dest, tag, needs_gradient, context.check.caller.name)


@operation(RECV)
def recv_activation(comm: MpiCommunicator, source: int, tag: int) -> tuple[Array, Activation]:
    context = comm._context
    return context.activations.recv(source, tag, context.check.caller.name)


@operation(BACKWARD_OF_RECV)
def send_gradient(comm: MpiCommunicator, gradients: Array, activation: Activation) -> None:
    comm._context.activations.send_gradient(gradients, activation)


@operation(BACKWARD_OF_SEND)
def recv_gradient(comm: MpiCommunicator, activation: Activation) -> Array:
    return comm._context.activations.recv_gradient(activation)


@operation
def waitall(comm: MpiCommunicator, requests: Sequence[Request[_T]]) -> list[_T]:
    return nonblocking.waitall(requests)


@operation
def bcast(comm: MpiCommunicator, x: SameArray, root: int = 0, max_buf_len: int | None = None
          ) -> SameArray:
    context = comm._context
    root = array_buffers.checked_root(root, context.size)
    array = array_buffers.checked(x) if context.rank == root else None
    signature = pack('bcast', root=root) if array is None else packed('bcast', array, root)
    message = context.check.bcast(
        signature, root, b'' if array is None else inline_data(context, array))
    if len(message) > SIZE:
        return array_of(message) if array is None else _result(x, array)
    call = unpack(message)
    shape = _shapes(context, [call] * context.size, array)[root]
    result = context.transport_for(call.device).bcast(
        array, shape, call.dtype, call.device, root)
    return result if array is None else _result(x, array)


@operation
def gather(comm: MpiCommunicator, x: SameArray, root: int = 0) -> tuple[SameArray, ...] | None:
    context = comm._context
    root = array_buffers.checked_root(root, context.size)
    array = array_buffers.checked(x)
    signature = packed('gather', array, root)
    messages = context.check.gather(signature, inline_data(context, array))
    if has_data(messages):
        return received(context, messages, signature, array) if context.rank == root else None
    calls = [*map(unpack, messages)]
    return _transport_of(context, calls).gather(array, _shapes(context, calls, array), root)


@operation
def allgather(comm: MpiCommunicator, x: SameArray) -> tuple[SameArray, ...]:
    context = comm._context
    array = array_buffers.checked(x)
    signature = packed('allgather', array)
    messages = context.check.gather(signature, inline_data(context, array))
    if has_data(messages):
        return received(context, messages, signature, array)
    calls = [*map(unpack, messages)]
    return _transport_of(context, calls).allgather(array, _shapes(context, calls, array))


@operation
def alltoall(comm: MpiCommunicator, xs: Sequence[SameArray]) -> tuple[SameArray, ...]:
    context = comm._context
    arrays: list[Array] | None = None
    if (stack := inline_stack(context, xs)) is not None:
        shape, dtype, data = stack
        signature = pack('alltoall', shape, dtype, number=_HOMOGENEOUS)
    else:
        arrays, data = checked_sequence(context, xs), b''
        kind, shape = _kind_of([array.shape for array in arrays])
        signature = pack('alltoall', shape, arrays[0].dtype, number=kind,
                         device=array_buffers.on_device(arrays[0]))
    messages = context.check.gather(signature, data)
    if has_data(messages):
        return received(context, messages, signature, xs[context.rank], context.rank)
    arrays = [*xs] if arrays is None else arrays
    shapes = [array.shape for array in arrays]
    calls = [*map(unpack, messages)]
    kind = max(call.number for call in calls)
    if kind == _HOMOGENEOUS and len({call.shape for call in calls}) > 1:
        kind = _SHORT
    if kind == _LONG:
        shapes = context.mpi_comm.alltoall(shapes)
    elif kind == _SHORT:
        theirs = bytearray(message_header.SIZE * context.size)
        context.mpi_comm.Alltoall(_headers(arrays), theirs)
        shapes = message_header.shapes(theirs)
    return _transport_of(context, calls).alltoall(arrays, shapes, kind == _HOMOGENEOUS)


@operation
def scatter(comm: MpiCommunicator, xs: Array, root: int = 0) -> Array:
    context = comm._context
    root = array_buffers.checked_root(root, context.size)
    if context.rank != root:
        return _scattered(context, root)
    if (stack := inline_stack(context, xs)) is not None:
        shape, dtype, data = stack
        context.check.bcast(
            pack('scatter', shape, dtype, root, number=_HOMOGENEOUS), root, data)
        return xs[root].copy()
    arrays = checked_sequence(context, xs)
    shapes = [array.shape for array in arrays]
    kind, shape = _kind_of(shapes)
    dtype, device = arrays[0].dtype, array_buffers.on_device(arrays[0])
    context.check.bcast(
        pack('scatter', shape, dtype, root, number=kind, device=device), root)
    if kind == _LONG:
        context.mpi_comm.scatter(shapes, root)
    elif kind == _SHORT:
        context.mpi_comm.Scatter(_headers(arrays), bytearray(message_header.SIZE), root)
    return context.transport_for(device).scatter(
        arrays, arrays[root].shape, dtype, device, kind == _HOMOGENEOUS, root)


def _scattered(context: Context, root: int) -> Array:
    """Receive the array that the root scatters to this rank."""
    message = context.check.bcast(pack('scatter', root=root), root)
    if len(message) > SIZE:
        return array_of(message, context.rank)
    call = unpack(message)
    shape = call.shape
    if call.number == _LONG:
        shape = context.mpi_comm.scatter(None, root)
    elif call.number == _SHORT:
        mine = bytearray(message_header.SIZE)
        context.mpi_comm.Scatter(None, mine, root)
        shape, = message_header.shapes(mine)
    return context.transport_for(call.device).scatter(
        [], shape, call.dtype, call.device, call.number == _HOMOGENEOUS, root)


def _transport_of(context: Context, calls: Sequence[CallSignature]) -> MpiTransport:
    """Return the transport for the arrays of these calls."""
    devices = {call.device for call in calls}
    return context.transport_for(calls[context.rank].device, len(devices) == 1)


def checked_sequence(context: Context, xs: Array) -> list[Array]:
    """Return the arrays of a sequence after checking that they are valid, one for each rank."""
    if not isinstance(xs, (tuple, list)):
        xs = array_buffers.checked(xs)
        if xs.ndim == 0:
            raise TypeError(f'expected one array for each of the {context.size} ranks but got a '
                            '0-dimensional array')
    arrays = [array_buffers.checked(x) for x in xs]
    if len(arrays) != context.size:
        raise ValueError(f'expected one array for each of the {context.size} ranks but got '
                         f'{len(arrays)}')
    if len({array.dtype for array in arrays}) > 1:
        raise TypeError('the arrays for the ranks must have the same dtype but have '
                        + ', '.join(str(array.dtype) for array in arrays))
    if len({*map(array_buffers.on_device, arrays)}) > 1:
        raise TypeError('the arrays for the ranks must all be on the host, or all on a device; '
                        'move them with chainer.cuda.to_cpu or to_gpu')
    return arrays


def _shapes(context: Context, calls: Sequence[CallSignature], array: Array | None
            ) -> list[tuple[int, ...]]:
    """Return the shapes of the arrays of all ranks.

    Shapes with many dimensions do not fit into a signature, so the ranks gather them separately.
    """
    if any(call.ndim > call_signature.MAX_INLINE_DIMS for call in calls):
        return context.mpi_comm.allgather(getattr(array, 'shape', ()))
    return [call.shape for call in calls]


def _result(x: Array, array: Array) -> Array:
    """Return the result on the root: ``x`` itself, unless it is of a subclass."""
    return x if type(x) is type(array) or isinstance(x, np.generic) else array


def packed(operation: str, array: Array, root: int = -1, op: str = '') -> bytes:
    """Return the signature of a call with one array."""
    return pack(operation, array.shape, array.dtype, root, op, array_buffers.on_device(array))


def _headers(arrays: Sequence[Array]) -> bytes:
    """Return the concatenated headers of the arrays."""
    return b''.join([message_header.of_array(x.shape, x.dtype) for x in arrays])


def _kind_of(shapes: list[tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
    """Return how to send the shapes of one array per rank, and their common shape if any."""
    if any(len(shape) > call_signature.MAX_INLINE_DIMS for shape in shapes):
        return _LONG, ()
    return (_HOMOGENEOUS, shapes[0]) if shapes.count(shapes[0]) == len(shapes) else (_SHORT, ())
