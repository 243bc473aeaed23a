"""Array operations without arithmetic: point to point, broadcast, gather, scatter, all-to-all."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from chainermn._collectives import nonblocking
from chainermn._collectives.activations import Activation, Activations
from chainermn._collectives.inline_arrays import InlineArrays, array_of, has_data
from chainermn._collectives.nonblocking import Request
from chainermn._collectives.operation import operation
from chainermn._collectives.point_to_point import Messages
from chainermn._operations import call_signature, message_header
from chainermn._operations.call_signature import SIZE, CallSignature, pack, unpack
from chainermn._transport import array_buffers
from chainermn._transport.mpi_transport import MpiTransport
from chainermn._types import Array, NoResult, ReceivedArray

_T = TypeVar('_T')

#: How the shapes of one array per rank are sent: a common shape in the signature of the call; the
#: header of a message for each; or pickled, if a shape has too many dimensions for a header.
_HOMOGENEOUS, _SHORT, _LONG = range(3)


class ArrayOperations(InlineArrays):
    """Array operations of a communicator on MPI."""

    _messages: Messages
    _activations: Activations

    @operation
    def send(self, data: Array, dest: int, tag: int) -> None:
        self._messages.send(data, dest, tag)

    @operation
    def recv(self, source: int, tag: int) -> ReceivedArray:
        return self._messages.recv(source, tag)

    @operation
    def isend(self, x: Array, dest: int, tag: int = 0) -> Request[NoResult]:
        request = self._messages.isend(x, dest, tag)
        request._tracer = self._tracer
        return request

    @operation
    def irecv(self, source: int, tag: int = 0) -> Request[ReceivedArray]:
        request = self._messages.irecv(source, tag)
        request._tracer = self._tracer
        return request

    @operation('send_activation')
    def _send_activation(self, data: Array, dest: int, tag: int, needs_gradient: bool
                         ) -> Activation:
        return self._activations.send(
            data, dest, tag, needs_gradient, self._consistency.caller.name)

    @operation('recv_activation')
    def _recv_activation(self, source: int, tag: int) -> tuple[Array, Activation]:
        return self._activations.recv(source, tag, self._consistency.caller.name)

    @operation('send_gradient')
    def _send_gradient(self, gradients: Array, activation: Activation) -> None:
        self._activations.send_gradient(gradients, activation)

    @operation('recv_gradient')
    def _recv_gradient(self, activation: Activation) -> Array:
        return self._activations.recv_gradient(activation)

    @operation
    def waitall(self, requests: Sequence[Request[_T]]) -> list[_T]:
        return nonblocking.waitall(requests)

    @operation
    def bcast(self, x: Array, root: int = 0, max_buf_len: int | None = None) -> Array:
        root = array_buffers.checked_root(root, self.size)
        array = array_buffers.checked(x) if self.rank == root else None
        signature = pack('bcast', root=root) if array is None else packed('bcast', array, root)
        message = self._consistency.bcast(
            signature, root, b'' if array is None else self._inline(array))
        if len(message) > SIZE:
            return array_of(message) if array is None else _result(x, array)
        call = unpack(message)
        shape = self._shapes([call] * self._size, array)[root]
        received = self._transport_for(call.device).bcast(
            array, shape, call.dtype, call.device, root)
        return received if array is None else _result(x, array)

    @operation
    def gather(self, x: Array, root: int = 0) -> tuple[Array, ...] | None:
        root = array_buffers.checked_root(root, self.size)
        array = array_buffers.checked(x)
        signature = packed('gather', array, root)
        messages = self._consistency.gather(signature, self._inline(array))
        if has_data(messages):
            return self._received(messages, signature, array) if self._rank == root else None
        calls = [*map(unpack, messages)]
        return self._transport_of(calls).gather(array, self._shapes(calls, array), root)

    @operation
    def allgather(self, x: Array) -> tuple[Array, ...]:
        array = array_buffers.checked(x)
        signature = packed('allgather', array)
        messages = self._consistency.gather(signature, self._inline(array))
        if has_data(messages):
            return self._received(messages, signature, array)
        calls = [*map(unpack, messages)]
        return self._transport_of(calls).allgather(array, self._shapes(calls, array))

    @operation
    def alltoall(self, xs: Sequence[Array]) -> tuple[Array, ...]:
        arrays: list[Array] | None = None
        if (stack := self._inline_stack(xs)) is not None:
            shape, dtype, data = stack
            signature = pack('alltoall', shape, dtype, number=_HOMOGENEOUS)
        else:
            arrays, data = self._checked_sequence(xs), b''
            kind, shape = _kind_of([array.shape for array in arrays])
            signature = pack('alltoall', shape, arrays[0].dtype, number=kind,
                             device=array_buffers.on_device(arrays[0]))
        messages = self._consistency.gather(signature, data)
        if has_data(messages):
            return self._received(messages, signature, xs[self._rank], self._rank)
        arrays = [*xs] if arrays is None else arrays
        shapes = [array.shape for array in arrays]
        calls = [*map(unpack, messages)]
        kind = max(call.number for call in calls)
        if kind == _HOMOGENEOUS and len({call.shape for call in calls}) > 1:
            kind = _SHORT
        if kind == _LONG:
            shapes = self._arrays.alltoall(shapes)
        elif kind == _SHORT:
            theirs = bytearray(message_header.SIZE * self.size)
            self._arrays.Alltoall(_headers(arrays), theirs)
            shapes = message_header.shapes(theirs)
        return self._transport_of(calls).alltoall(arrays, shapes, kind == _HOMOGENEOUS)

    @operation
    def scatter(self, xs: Array, root: int = 0) -> Array:
        root = array_buffers.checked_root(root, self.size)
        if self._rank != root:
            return self._scattered(root)
        if (stack := self._inline_stack(xs)) is not None:
            shape, dtype, data = stack
            self._consistency.bcast(
                pack('scatter', shape, dtype, root, number=_HOMOGENEOUS), root, data)
            return xs[root].copy()
        arrays = self._checked_sequence(xs)
        shapes = [array.shape for array in arrays]
        kind, shape = _kind_of(shapes)
        dtype, device = arrays[0].dtype, array_buffers.on_device(arrays[0])
        self._consistency.bcast(
            pack('scatter', shape, dtype, root, number=kind, device=device), root)
        if kind == _LONG:
            self._arrays.scatter(shapes, root)
        elif kind == _SHORT:
            self._arrays.Scatter(_headers(arrays), bytearray(message_header.SIZE), root)
        return self._transport_for(device).scatter(
            arrays, arrays[root].shape, dtype, device, kind == _HOMOGENEOUS, root)

    def _scattered(self, root: int) -> Array:
        """Receive the array that the root scatters to this rank."""
        message = self._consistency.bcast(pack('scatter', root=root), root)
        if len(message) > SIZE:
            return array_of(message, self._rank)
        call = unpack(message)
        shape = call.shape
        if call.number == _LONG:
            shape = self._arrays.scatter(None, root)
        elif call.number == _SHORT:
            mine = bytearray(message_header.SIZE)
            self._arrays.Scatter(None, mine, root)
            shape, = message_header.shapes(mine)
        return self._transport_for(call.device).scatter(
            [], shape, call.dtype, call.device, call.number == _HOMOGENEOUS, root)

    def _transport_of(self, calls: Sequence[CallSignature]) -> MpiTransport:
        """Return the transport for the arrays of these calls."""
        devices = {call.device for call in calls}
        return self._transport_for(calls[self._rank].device, len(devices) == 1)

    def _checked_sequence(self, xs: Array) -> list[Array]:
        """Check one array per rank, all of one dtype."""
        if not isinstance(xs, (tuple, list)):
            xs = array_buffers.checked(xs)
            if xs.ndim == 0:
                raise TypeError(f'expected one array for each of the {self.size} ranks but got an '
                                'array without dimensions')
        arrays = [array_buffers.checked(x) for x in xs]
        if len(arrays) != self.size:
            raise ValueError(f'expected one array for each of the {self.size} ranks but got '
                             f'{len(arrays)}')
        if len({array.dtype for array in arrays}) > 1:
            raise TypeError('the arrays for the ranks must have the same dtype but are '
                            + ', '.join(str(array.dtype) for array in arrays))
        if len({*map(array_buffers.on_device, arrays)}) > 1:
            raise TypeError('the arrays for the ranks must all be on the host, or all on a device')
        return arrays

    def _shapes(self, calls: Sequence[CallSignature], array: Array | None
                ) -> list[tuple[int, ...]]:
        """Return the shapes on all ranks; shapes with many dimensions need a second exchange."""
        if any(call.ndim > call_signature.MAX_INLINE_DIMS for call in calls):
            return self._arrays.allgather(getattr(array, 'shape', ()))
        return [call.shape for call in calls]


def _result(x: Array, array: Array) -> Array:
    """Return the result of the root: ``x`` itself, unless it is of a subclass."""
    return x if type(x) is type(array) or isinstance(x, np.generic) else array


def packed(operation: str, array: Array, root: int = -1, op: str = '') -> bytes:
    """Return the signature of a call with one array."""
    return pack(operation, array.shape, array.dtype, root, op, array_buffers.on_device(array))


def _headers(arrays: Sequence[Array]) -> bytes:
    """Return the header of each array, one after the other."""
    return b''.join([message_header.of_array(x.shape, x.dtype) for x in arrays])


def _kind_of(shapes: list[tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
    """How to send the shapes of one array per rank, and their common shape."""
    if any(len(shape) > call_signature.MAX_INLINE_DIMS for shape in shapes):
        return _LONG, ()
    return (_HOMOGENEOUS, shapes[0]) if shapes.count(shapes[0]) == len(shapes) else (_SHORT, ())
