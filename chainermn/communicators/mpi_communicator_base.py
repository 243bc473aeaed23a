"""The verbs on MPI, and the template by which gradients are averaged."""
from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import chainer
import numpy as np
from mpi4py import MPI
from mpi4py.util import pkl5

from chainermn.communicators import _bucket, _header, _topology, _wire
from chainermn.communicators._agreement import Agreement
from chainermn.communicators._header import pack
from chainermn.communicators._messages import Messages
from chainermn.communicators._pickled import Pickled
from chainermn.communicators.communicator_base import CommunicatorBase

_OPS = {'sum': MPI.SUM, 'prod': MPI.PROD, 'max': MPI.MAX, 'min': MPI.MIN}
_BOOL_OPS = {'sum': MPI.LOR, 'prod': MPI.LAND, 'max': MPI.LOR, 'min': MPI.LAND}


class MpiCommunicatorBase(CommunicatorBase):
    """All verbs of :class:`CommunicatorBase` on MPI.  Collective: every rank makes one.

    A subclass says which gradients share a buffer (:meth:`_groups`) and how a buffer is summed
    (:meth:`_sum_in_place`); that is all in which the MPI communicators differ.

    Args:
        mpi_comm: ``mpi4py.MPI.Intracomm``.  Arrays, objects and the agreement travel on duplicates
            of it, so that nothing can be taken for the user's own messages on it.
    """

    def __init__(self, mpi_comm: Any) -> None:
        super().__init__()
        self._mpi_comm = mpi_comm
        self._rank = mpi_comm.rank
        self._size = mpi_comm.size
        self._agreement: Any = Agreement(mpi_comm.Dup())
        self._arrays: Any = mpi_comm.Dup()
        self._objects: Any = pkl5.Intracomm(mpi_comm.Dup())
        self._messages: Any = Messages(self._arrays, self._objects)
        self._topology = _topology.discover(self._arrays)
        with self.config_scope():
            self.batched_copy = False

    # --- who and where -----------------------------------------------------------------------

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator this one was made from, for the user's own messages."""
        return self._mpi_comm

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def intra_rank(self) -> int:
        return self._topology.intra_rank

    @property
    def intra_size(self) -> int:
        return self._topology.intra_size

    @property
    def inter_rank(self) -> int:
        return self._topology.inter_rank

    @property
    def inter_size(self) -> int:
        return self._topology.inter_size

    # --- groups ------------------------------------------------------------------------------

    def split(self, color: int, key: int) -> Any:
        try:
            color, key = operator.index(color), operator.index(key)
            if color < 0:
                raise ValueError(f'color has to be 0 or more, not {color}')
        except Exception as error:
            self.refuse('split', error)
        self._agreement.same(pack('split'))
        part = type(self)(self._arrays.Split(color, key))
        for name, value in self._configs.items():
            part.set_config(name, value)
        return part

    def barrier(self) -> None:
        self._agreement.same(pack('barrier'))
        self._arrays.Barrier()

    def refuse(self, verb: str, error: Exception) -> NoReturn:
        self._agreement.refuse(verb, error)

    def finalize(self) -> None:
        if isinstance(self._agreement, _Finalized):
            return
        self._agreement.same(pack('finalize'))
        self._agreement.mpi_comm.Free()
        self._objects.Free()
        self._arrays.Free()
        self._agreement = self._arrays = self._objects = self._messages = _Finalized()

    # --- arrays ------------------------------------------------------------------------------

    def send(self, data: Any, dest: int, tag: int) -> None:
        self._messages.send(data, dest, tag)

    def recv(self, source: int, tag: int) -> Any:
        return self._messages.recv(source, tag)

    def bcast(self, x: Any, root: int = 0, max_buf_len: int | None = None) -> Any:
        try:
            root = self._checked_root(root)
            array = _wire.checked(x) if self._rank == root else None
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
            root = self._checked_root(root)
            array = _wire.checked(x)
        except Exception as error:
            self.refuse('gather', error)
        headers = self._agreement.exchange(_packed('gather', array, root))
        shapes = self._shapes(headers, array)
        sent = _wire.raw(_wire.to_buffer(array))
        if self._rank != root:
            self._arrays.Gatherv(sent, None, root)
            return None
        received = _Pieces(shapes, array.dtype, _wire.on_device(array))
        self._arrays.Gatherv(sent, received.spec, root)
        return received.arrays()

    def allgather(self, x: Any) -> tuple[Any, ...]:
        try:
            array = _wire.checked(x)
        except Exception as error:
            self.refuse('allgather', error)
        headers = self._agreement.exchange(_packed('allgather', array))
        received = _Pieces(self._shapes(headers, array), array.dtype, _wire.on_device(array))
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
        wide = array.astype(_summed_in(array.dtype), copy=False)
        mean = self._reduced(wide, 'sum')
        mean *= mean.dtype.type(1 / self._size)
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
            theirs = bytearray(_header.SIZE * self._size)
            self._arrays.Alltoall(b''.join(pack('alltoall', shape) for shape in shapes), theirs)
            shapes = [_header.unpack(theirs, _header.SIZE * r).shape for r in range(self._size)]
        sent = _Pieces.of(arrays)
        received = _Pieces(shapes, arrays[0].dtype, _wire.on_device(arrays[0]))
        self._arrays.Alltoallv(sent.spec, received.spec)
        return received.arrays()

    def scatter(self, xs: Any, root: int = 0) -> Any:
        arrays: list[Any] = []
        try:
            root = self._checked_root(root)
            if self._rank == root:
                arrays = self._checked_sequence(xs)
        except Exception as error:
            self.refuse('scatter', error)
        if self._rank != root:
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
        self._arrays.Scatterv(_Pieces.of(arrays).spec, MPI.IN_PLACE, root)
        return arrays[root].copy()

    # --- objects -----------------------------------------------------------------------------

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._messages.send_obj(obj, dest, tag)

    def recv_obj(self, source: int, status: Any = None, tag: int = MPI.ANY_TAG) -> Any:
        return self._messages.recv_obj(source, tag, status)

    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        try:
            root = self._checked_root(root)
            pickled = Pickled(obj) if self._rank == root else None
        except Exception as error:
            self.refuse('bcast_obj', error)
        self._agreement.same(pack('bcast_obj', root=root))
        received = self._objects.bcast(pickled, root)
        return obj if self._rank == root else received

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        try:
            root = self._checked_root(root)
            pickled = Pickled(obj)
        except Exception as error:
            self.refuse('gather_obj', error)
        self._agreement.same(pack('gather_obj', root=root))
        return self._objects.gather(pickled, root)

    def allgather_obj(self, obj: Any) -> list[Any]:
        return self._allgather_obj('allgather_obj', obj)

    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        pickled = None
        try:
            root = self._checked_root(root)
            if self._rank == root:
                if objs is None or len(objs) != self._size:
                    raise ValueError(f'scatter_obj takes one object for each of the {self._size} '
                                     f'ranks, but got {objs if objs is None else len(objs)}')
                pickled = [Pickled(obj) for obj in objs]
        except Exception as error:
            self.refuse('scatter_obj', error)
        self._agreement.same(pack('scatter_obj', root=root))
        return self._objects.scatter(pickled, root)

    def allreduce_obj(self, obj: Any) -> Any:
        return functools.reduce(operator.add, self._allgather_obj('allreduce_obj', obj))

    def _allgather_obj(self, verb: str, obj: Any) -> list[Any]:
        try:
            pickled = Pickled(obj)
        except Exception as error:
            self.refuse(verb, error)
        self._agreement.same(pack(verb))
        return self._objects.allgather(pickled)

    # --- models ------------------------------------------------------------------------------

    def bcast_data(self, model: Any) -> None:
        arrays = self._agreed_parameters('bcast_data', model, 'data')
        for group in self._groups(arrays):
            self._bcast_in_place(group)

    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:
        arrays = self._agreed_parameters('multi_node_mean_grad', model, 'grad', zero_fill)
        for group in self._groups(arrays):
            summed = self._sum_in_place(_bucket.pack(group, _summed_in(group[0].dtype)))
            _bucket.unpack(summed, group, 1 / self._size)
        if chainer.is_debug():
            _bucket.check_finite(model)

    def _groups(self, arrays: Sequence[Any]) -> list[list[Any]]:
        """Says which arrays, all of one dtype, share a buffer.  One rule for all ranks."""
        raise NotImplementedError(f'{type(self).__name__} has to define _groups')

    def _sum_in_place(self, buffer: Any) -> Any:
        """Returns the sum of the flat buffers of all ranks; may overwrite the buffer."""
        if _wire.on_device(buffer) and not _wire.cuda_aware():
            staged = self._sum_in_place(_wire.to_buffer(buffer))
            return _wire.from_buffer(staged, staged.shape, device=True)
        self._arrays.Allreduce(MPI.IN_PLACE, buffer)
        return buffer

    def _bcast_in_place(self, group: list[Any]) -> None:
        device = _wire.on_device(group[0])
        if self._rank == 0:
            self._arrays.Bcast(_wire.raw(_wire.to_buffer(_bucket.pack(group))))
            return
        shape = (sum(array.size for array in group),)
        buffer = _wire.new_buffer(shape, group[0].dtype, device)
        self._arrays.Bcast(_wire.raw(buffer))
        _bucket.unpack(_wire.from_buffer(buffer, shape, device), group)

    # --- what the verbs share ----------------------------------------------------------------

    def _agreed_parameters(self, verb: str, model: Any, attribute: str,
                           zero_fill: bool = False) -> list[Any]:
        try:
            arrays = _bucket.parameters(model, attribute, zero_fill)
        except Exception as error:
            self.refuse(verb, error)
        described = _bucket.describe(arrays)
        self._agreement.same(pack(verb, number=_header.digest(described)), described)
        return list(arrays.values())

    def _checked_root(self, root: Any) -> int:
        if isinstance(root, bool) or not hasattr(root, '__index__'):
            raise TypeError(f'root has to be an integer, not {root!r}')
        if not 0 <= root < self._size:
            raise ValueError(f'root has to be a rank from 0 to {self._size - 1}, not {root}')
        return operator.index(root)

    def _checked_sequence(self, xs: Any) -> list[Any]:
        """One array for each rank, all of one dtype."""
        if not isinstance(xs, (tuple, list)):
            xs = list(_wire.checked(xs)) if getattr(xs, 'ndim', 0) else _wire.checked(xs)
        arrays = [_wire.checked(x) for x in xs]
        if len(arrays) != self._size:
            raise ValueError(f'expected one array for each of the {self._size} ranks but got '
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
        device = _wire.on_device(array)
        result = _wire.new_buffer(array.shape, array.dtype, device)
        ops = _BOOL_OPS if array.dtype == np.bool_ else _OPS
        self._arrays.Allreduce(_wire.to_buffer(array), result, ops[op])
        return _wire.from_buffer(result, array.shape, device)


class _Pieces:
    """Arrays of one dtype for or from all ranks, side by side in one buffer."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype, device: bool,
                 buffer: Any = None) -> None:
        self._shapes = shapes
        self._device = device
        self._ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
        self._buffer = _wire.new_buffer((self._ends[-1],), dtype, device) \
            if buffer is None else buffer

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> _Pieces:
        """Packs arrays to be sent."""
        return cls([array.shape for array in arrays], arrays[0].dtype, False,
                   _wire.to_buffer(_bucket.pack(arrays)))

    @property
    def spec(self) -> list[Any]:
        """What mpi4py takes: the buffer as bytes, and count and start of each piece."""
        size = self._buffer.dtype.itemsize
        starts = [0, *self._ends[:-1]]
        counts = [size * (end - start) for start, end in zip(starts, self._ends, strict=True)]
        return [_wire.raw(self._buffer), counts, [size * start for start in starts], MPI.BYTE]

    def arrays(self) -> tuple[Any, ...]:
        """The pieces as arrays."""
        whole = _wire.from_buffer(self._buffer, self._buffer.shape, self._device)
        starts = [0, *self._ends[:-1]]
        return tuple(whole[start:end].reshape(shape) for start, end, shape in zip(
            starts, self._ends, self._shapes, strict=True))


class _Finalized:
    """Stands for what a finalized communicator no longer has."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError('this communicator was finalized; make a new one with '
                           'chainermn.create_communicator')


def _packed(verb: str, array: Any, root: int = -1, op: str = '') -> bytes:
    return pack(verb, array.shape, array.dtype, root, op, _wire.on_device(array))


def _has_long(shapes: Sequence[tuple[int, ...]]) -> int:
    return int(any(len(shape) > _header.MAX_INLINE_DIMS for shape in shapes))


def _summed_in(dtype: np.dtype) -> np.dtype:
    """The dtype in which arrays of a dtype are summed: float16 in float32."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def _check_op(op: Any, dtype: np.dtype) -> None:
    if op not in _OPS:
        raise ValueError(f'op has to be one of {", ".join(map(repr, _OPS))}, not {op!r}')
    if dtype.kind == 'c' and op in ('max', 'min'):
        raise TypeError(f'complex numbers have no order: op={op!r} takes no {dtype} array')
