"""The verbs on arrays: collective ones, after the agreement, as buffers."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np
from mpi4py import MPI

from chainermn.communicators import _header, _wire
from chainermn.communicators._agreement import Agreement
from chainermn.communicators._header import pack
from chainermn.communicators._messages import Messages
from chainermn.communicators._pieces import Pieces
from chainermn.communicators.communicator_base import CommunicatorBase

_OPS = {'sum': MPI.SUM, 'prod': MPI.PROD, 'max': MPI.MAX, 'min': MPI.MIN}
_BOOL_OPS = {'sum': MPI.LOR, 'prod': MPI.LAND, 'max': MPI.LOR, 'min': MPI.LAND}


class ArrayVerbs(CommunicatorBase):
    """The part of a communicator on MPI that exchanges arrays."""

    _agreement: Agreement
    _messages: Messages
    _arrays: Any
    _objects: Any

    def send(self, data: Any, dest: int, tag: int) -> None:
        self._messages.send(data, dest, tag)

    def recv(self, source: int, tag: int) -> Any:
        return self._messages.recv(source, tag)

    def bcast(self, x: Any, root: int = 0, max_buf_len: int | None = None) -> Any:
        try:
            root = _wire.checked_root(root, self.size)
            array = _wire.checked(x) if self.rank == root else None
        except Exception as error:
            self.refuse('bcast', error)
        header = pack('bcast', root=root) if array is None else _packed('bcast', array, root)
        headers = self._agreement.exchange(header)
        shape = self._shapes(headers, array)[root]
        if array is not None:
            self._arrays.Bcast(_wire.raw(_wire.to_buffer(array)), root)
            return x
        buffer = _wire.new_buffer(shape, headers[root].dtype, headers[root].device)
        self._arrays.Bcast(_wire.raw(buffer), root)
        return _wire.from_buffer(buffer, shape, headers[root].device)

    def gather(self, x: Any, root: int = 0) -> tuple[Any, ...] | None:
        try:
            root = _wire.checked_root(root, self.size)
            array = _wire.checked(x)
        except Exception as error:
            self.refuse('gather', error)
        headers = self._agreement.exchange(_packed('gather', array, root))
        shapes = self._shapes(headers, array)
        sent = _wire.raw(_wire.to_buffer(array))
        if self.rank != root:
            self._arrays.Gatherv(sent, None, root)
            return None
        received = Pieces(shapes, array.dtype, _wire.on_device(array))
        self._arrays.Gatherv(sent, received.spec, root)
        return received.arrays()

    def allgather(self, x: Any) -> tuple[Any, ...]:
        try:
            array = _wire.checked(x)
        except Exception as error:
            self.refuse('allgather', error)
        headers = self._agreement.exchange(_packed('allgather', array))
        received = Pieces(self._shapes(headers, array), array.dtype, _wire.on_device(array))
        self._arrays.Allgatherv(_wire.raw(_wire.to_buffer(array)), received.spec)
        return received.arrays()

    def allreduce(self, x: Any, op: str = 'sum') -> Any:
        try:
            array = _wire.checked(x)
            _check_op(op, array.dtype)
        except Exception as error:
            self.refuse('allreduce', error)
        self._agreement.same(_packed('allreduce', array, op=op))
        return self._reduced(array, op)

    def multi_node_mean(self, x: Any) -> Any:
        try:
            array = _wire.checked(x)
            if array.dtype.kind != 'f':
                raise TypeError(f'the mean is of floating-point arrays, not {array.dtype}')
        except Exception as error:
            self.refuse('multi_node_mean', error)
        self._agreement.same(_packed('multi_node_mean', array))
        wide = array.astype(_wire.summed_in(array.dtype), copy=False)
        mean = self._reduced(wide, 'sum')
        mean *= mean.dtype.type(1 / self.size)
        return mean.astype(array.dtype, copy=False)

    def alltoall(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        try:
            arrays = self._checked_sequence(xs)
        except Exception as error:
            self.refuse('alltoall', error)
        shapes = [array.shape for array in arrays]
        headers = self._agreement.exchange(
            pack('alltoall', dtype=arrays[0].dtype, number=_has_long(shapes)))
        if any(header.number for header in headers):
            shapes = self._objects.alltoall(shapes)
        else:
            theirs = bytearray(_header.SIZE * self.size)
            self._arrays.Alltoall(b''.join(pack('alltoall', shape) for shape in shapes), theirs)
            shapes = [_header.unpack(theirs, _header.SIZE * r).shape for r in range(self.size)]
        sent = Pieces.of(arrays)
        received = Pieces(shapes, arrays[0].dtype, _wire.on_device(arrays[0]))
        self._arrays.Alltoallv(sent.spec, received.spec)
        return received.arrays()

    def scatter(self, xs: Any, root: int = 0) -> Any:
        arrays: list[Any] = []
        try:
            root = _wire.checked_root(root, self.size)
            if self.rank == root:
                arrays = self._checked_sequence(xs)
        except Exception as error:
            self.refuse('scatter', error)
        if self.rank != root:
            header = self._agreement.exchange(pack('scatter', root=root))[root]
            mine = bytearray(_header.SIZE)
            self._arrays.Scatter(None, mine, root)
            shape = _header.unpack(mine).shape
            if header.number:
                shape = self._objects.scatter(None, root)
            buffer = _wire.new_buffer(shape, header.dtype, header.device)
            self._arrays.Scatterv(None, _wire.raw(buffer), root)
            return _wire.from_buffer(buffer, shape, header.device)
        shapes = [array.shape for array in arrays]
        long = _has_long(shapes)
        self._agreement.exchange(pack('scatter', dtype=arrays[0].dtype, root=root, number=long,
                                      device=_wire.on_device(arrays[0])))
        self._arrays.Scatter(b''.join(pack('scatter', shape) for shape in shapes),
                             bytearray(_header.SIZE), root)
        if long:
            self._objects.scatter(shapes, root)
        self._arrays.Scatterv(Pieces.of(arrays).spec, MPI.IN_PLACE, root)
        return arrays[root].copy()

    def _checked_sequence(self, xs: Any) -> list[Any]:
        """One array for each rank, all of one dtype."""
        if not isinstance(xs, (tuple, list)):
            xs = list(_wire.checked(xs)) if getattr(xs, 'ndim', 0) else _wire.checked(xs)
        arrays = [_wire.checked(x) for x in xs]
        if len(arrays) != self.size:
            raise ValueError(f'expected one array for each of the {self.size} ranks but got '
                             f'{len(arrays)}')
        if len({array.dtype for array in arrays}) > 1:
            raise TypeError('the arrays for the ranks have to be of one dtype but are '
                            + ', '.join(str(array.dtype) for array in arrays))
        return arrays

    def _shapes(self, headers: Sequence[_header.Header], array: Any) -> list[tuple[int, ...]]:
        """The shapes of all ranks; those with many dimensions need one more exchange."""
        if any(header.ndim > _header.MAX_INLINE_DIMS for header in headers):
            return self._objects.allgather(getattr(array, 'shape', ()))
        return [header.shape for header in headers]

    def _reduced(self, array: Any, op: str) -> Any:
        if array.dtype == np.float16:
            with np.errstate(over='ignore'):
                return self._reduced(array.astype(np.float32), op).astype(np.float16)
        if array.dtype.kind == 'f' and op in ('max', 'min'):
            bits = self._reduced(_ordered_bits(array.reshape(-1), op), op)
            return _flipped(bits).view(array.dtype).reshape(array.shape)
        device = _wire.on_device(array)
        result = _wire.new_buffer(array.shape, array.dtype, device)
        ops = _BOOL_OPS if array.dtype == np.bool_ else _OPS
        self._arrays.Allreduce(_wire.to_buffer(array), result, ops[op])
        return _wire.from_buffer(result, array.shape, device)


def _packed(verb: str, array: Any, root: int = -1, op: str = '') -> bytes:
    return pack(verb, array.shape, array.dtype, root, op, _wire.on_device(array))


def _has_long(shapes: Sequence[tuple[int, ...]]) -> int:
    return int(any(len(shape) > _header.MAX_INLINE_DIMS for shape in shapes))


def _ordered_bits(x: Any, op: str) -> Any:
    """Floats as integers in the same order; a NaN is beyond all others, so that ``op`` keeps it.

    MPI's own comparison of NaNs, and of 0.0 with -0.0, depends on the order of the ranks, and can
    come out differently on them.
    """
    nan = x.dtype.type(np.nan if op == 'max' else -np.nan)
    x = chainer.backend.get_array_module(x).where(x == x, x, nan)
    return _flipped(x.view(f'i{x.dtype.itemsize}'))


def _flipped(bits: Any) -> Any:
    """Reverses the order of the negative ones; its own inverse."""
    info = np.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)


def _check_op(op: Any, dtype: np.dtype) -> None:
    if op not in _OPS:
        raise ValueError(f'op has to be one of {", ".join(map(repr, _OPS))}, not {op!r}')
    if dtype.kind == 'c' and op in ('max', 'min'):
        raise TypeError(f'complex numbers have no order: op={op!r} takes no {dtype} array')
