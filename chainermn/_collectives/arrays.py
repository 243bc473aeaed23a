"""The operations that move arrays: the collective ones after the agreement, as buffers."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chainermn import _signature
from chainermn._collectives import nonblocking
from chainermn._collectives.activations import Activation, Activations
from chainermn._collectives.nonblocking import Request
from chainermn._collectives.operation import Operations, collective
from chainermn._collectives.point_to_point import Messages
from chainermn._signature import pack
from chainermn._transport import array_buffers
from chainermn._transport.mpi import MpiTransport

#: Arrays for all ranks have one shape, which their header says; or several, each in a header of
#: its own; or some with more dimensions than a header takes.
_ALIKE, _SHORT, _LONG = range(3)


class ArrayOperations(Operations):
    """The part of a communicator on MPI that moves arrays."""

    _messages: Messages
    _activations: Activations
    _mpi_transport: MpiTransport

    def send(self, data: Any, dest: int, tag: int) -> None:
        self._messages.send(data, dest, tag)

    def recv(self, source: int, tag: int) -> Any:
        return self._messages.recv(source, tag)

    def isend(self, x: Any, dest: int, tag: int = 0) -> Request:
        return self._messages.isend(x, dest, tag)

    def irecv(self, source: int, tag: int = 0) -> Request:
        return self._messages.irecv(source, tag)

    def send_activation(self, data: Any, dest: int, tag: int, needs_gradient: bool) -> Activation:
        return self._activations.send(data, dest, tag, needs_gradient)

    def recv_activation(self, source: int, tag: int) -> tuple[Any, Activation]:
        return self._activations.recv(source, tag)

    def send_gradient(self, gradients: Any, activation: Activation) -> None:
        self._activations.send_gradient(gradients, activation)

    def recv_gradient(self, activation: Activation) -> Any:
        return self._activations.recv_gradient(activation)

    def waitall(self, requests: Sequence[Request]) -> list[Any]:
        return nonblocking.waitall(requests)

    @collective
    def bcast(self, x: Any, root: int = 0, max_buf_len: int | None = None) -> Any:
        try:
            root = array_buffers.checked_root(root, self.size)
            array = array_buffers.checked(x) if self.rank == root else None
        except Exception as error:
            self.refuse('bcast', error)
        header = pack('bcast', root=root) if array is None else packed('bcast', array, root)
        headers = self._agreement.exchange(header)
        shape = self._shapes(headers, array)[root]
        dtype, device = headers[root].dtype, headers[root].device
        received = self._transport(device, True).bcast(array, shape, dtype, device, root)
        return received if array is None else x

    @collective
    def gather(self, x: Any, root: int = 0) -> tuple[Any, ...] | None:
        try:
            root = array_buffers.checked_root(root, self.size)
            array = array_buffers.checked(x)
        except Exception as error:
            self.refuse('gather', error)
        headers = self._agreement.exchange(packed('gather', array, root))
        shapes = self._shapes(headers, array)
        alike = len({header.device for header in headers}) == 1
        return self._transport(array_buffers.on_device(array), alike).gather(array, shapes, root)

    @collective
    def allgather(self, x: Any) -> tuple[Any, ...]:
        try:
            array = array_buffers.checked(x)
        except Exception as error:
            self.refuse('allgather', error)
        headers = self._agreement.exchange(packed('allgather', array))
        alike = len({header.device for header in headers}) == 1
        transport = self._transport(array_buffers.on_device(array), alike)
        return transport.allgather(array, self._shapes(headers, array))

    @collective
    def alltoall(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        try:
            arrays = self._checked_sequence(xs)
        except Exception as error:
            self.refuse('alltoall', error)
        shapes = [array.shape for array in arrays]
        kind, shape = _kind_of(shapes)
        device = array_buffers.on_device(arrays[0])
        headers = self._agreement.exchange(
            pack('alltoall', shape, arrays[0].dtype, device=device, number=kind))
        kind = max(header.number for header in headers)
        if kind == _ALIKE and len({header.shape for header in headers}) > 1:
            kind = _SHORT
        if kind == _LONG:
            shapes = self._arrays.alltoall(shapes)
        elif kind == _SHORT:
            theirs = bytearray(_signature.SIZE * self.size)
            self._arrays.Alltoall(b''.join(pack('alltoall', shape) for shape in shapes), theirs)
            shapes = [_signature.unpack(theirs, _signature.SIZE * rank).shape
                      for rank in range(self.size)]
        alike = len({header.device for header in headers}) == 1
        return self._transport(device, alike).alltoall(arrays, shapes, kind == _ALIKE)

    @collective
    def scatter(self, xs: Any, root: int = 0) -> Any:
        arrays: list[Any] = []
        try:
            root = array_buffers.checked_root(root, self.size)
            if self.rank == root:
                arrays = self._checked_sequence(xs)
        except Exception as error:
            self.refuse('scatter', error)
        if self.rank != root:
            header = self._agreement.exchange(pack('scatter', root=root))[root]
            shape = header.shape
            if header.number == _LONG:
                shape = self._arrays.scatter(None, root)
            elif header.number == _SHORT:
                mine = bytearray(_signature.SIZE)
                self._arrays.Scatter(None, mine, root)
                shape = _signature.unpack(mine).shape
            return self._transport(header.device, True).scatter(
                [], shape, header.dtype, header.device, header.number == _ALIKE, root)
        shapes = [array.shape for array in arrays]
        kind, shape = _kind_of(shapes)
        dtype, device = arrays[0].dtype, array_buffers.on_device(arrays[0])
        self._agreement.exchange(pack('scatter', shape, dtype, root, number=kind, device=device))
        if kind == _LONG:
            self._arrays.scatter(shapes, root)
        elif kind == _SHORT:
            self._arrays.Scatter(b''.join(pack('scatter', shape) for shape in shapes),
                                 bytearray(_signature.SIZE), root)
        return self._transport(device, True).scatter(
            arrays, arrays[root].shape, dtype, device, kind == _ALIKE, root)

    def _checked_sequence(self, xs: Any) -> list[Any]:
        """One array for each rank, all of one dtype."""
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
            raise TypeError('the arrays for the ranks have to be of one dtype but are '
                            + ', '.join(str(array.dtype) for array in arrays))
        if len({*map(array_buffers.on_device, arrays)}) > 1:
            raise TypeError('the arrays for the ranks have to be all on the host or all on a '
                            'device')
        return arrays

    def _shapes(self, headers: Sequence[_signature.Header], array: Any) -> list[tuple[int, ...]]:
        """The shapes of all ranks; those with many dimensions need one more exchange."""
        if any(header.ndim > _signature.MAX_INLINE_DIMS for header in headers):
            return self._arrays.allgather(getattr(array, 'shape', ()))
        return [header.shape for header in headers]

    def _transport(self, device: bool, alike: bool) -> MpiTransport:
        """Says what carries arrays, on this rank on a device or not, on all ranks alike or not."""
        return self._mpi_transport


def packed(verb: str, array: Any, root: int = -1, op: str = '') -> bytes:
    """The header of a call with one array."""
    return pack(verb, array.shape, array.dtype, root, op, array_buffers.on_device(array))


def _kind_of(shapes: list[tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
    """How the shapes of arrays for all ranks travel, and the one that they have in common."""
    if any(len(shape) > _signature.MAX_INLINE_DIMS for shape in shapes):
        return _LONG, ()
    return (_ALIKE, shapes[0]) if shapes.count(shapes[0]) == len(shapes) else (_SHORT, ())
