"""Object operations: objects are pickled before the ranks compare their calls."""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from chainermn._collectives.operation import Operations, collective, collective_as, traced
from chainermn._collectives.point_to_point import Messages
from chainermn._signature import pack
from chainermn._transport import array_buffers
from chainermn._transport.elementwise import check_op
from chainermn._transport.pickling import Pickled, chunks, load
from chainermn._types import Object

#: Largest pickle, in bytes, that is broadcast without a second exchange.
_SINGLE = 2**24

#: Largest pickle, in bytes, that all ranks exchange padded to the length of the longest.
_SMALL = 2**13

_OPS: dict[str, Callable[[Object, Object], Object]] = {
    'sum': operator.add, 'prod': operator.mul, 'max': max, 'min': min}


class ObjectOperations(Operations):
    """Object operations of a communicator on MPI."""

    _messages: Messages

    @traced
    def send_obj(self, obj: Object, dest: int, tag: int = 0) -> None:
        self._messages.send_obj(obj, dest, tag)

    @traced
    def recv_obj(self, source: int, status: MPI.Status | None = None, tag: int = MPI.ANY_TAG
                 ) -> Object:
        return self._messages.recv_obj(source, tag, status)

    @collective
    def bcast_obj(self, obj: Object, max_buf_len: int = 256 * 1024 * 1024, root: int = 0) -> Object:
        root = array_buffers.checked_root(root, self.size)
        pickled = Pickled(obj) if self.rank == root else None
        number = 0 if pickled is None else _nbytes(pickled, _SINGLE)
        nbytes = self._consistency.numbers(pack('bcast_obj', root=root, number=number))[root]
        parts = self._memory_for_parts(pickled, root) if not nbytes else [
            np.empty(nbytes, np.uint8)] if pickled is None else pickled.parts
        for part in parts:
            for chunk in chunks(part):
                self._arrays.Bcast(chunk, root)
        return obj if pickled is not None else load(parts[0], parts[1:], root, self.rank)

    @collective_as('bcast_obj')
    def _memory_for_parts(self, pickled: Pickled | None, root: int) -> list[Object]:
        """The root's parts, and memory for them on the other ranks."""
        lengths = self._arrays.bcast(
            None if pickled is None else [part.nbytes for part in pickled.parts], root)
        parts = [np.empty(length, np.uint8) for length in lengths
                 ] if pickled is None else pickled.parts
        self._consistency.same(pack('bcast_obj', root=root))
        return parts

    @collective
    def gather_obj(self, obj: Object, root: int = 0) -> list[Object] | None:
        root = array_buffers.checked_root(root, self.size)
        pickled = Pickled(obj)
        lengths = self._consistency.numbers(
            pack('gather_obj', root=root, number=_nbytes(pickled, _SMALL)))
        if not all(lengths):
            objs = self._messages.exchange(
                {root: pickled}, range(self.size) if self.rank == root else ())
            return objs if self.rank == root else None
        length = max(lengths)
        received = bytearray(length * self.size) if self.rank == root else None
        self._arrays.Gather(pickled.stream.ljust(length), received, root)
        return None if received is None else self._loaded(received, length)

    @collective
    def allgather_obj(self, obj: Object) -> list[Object]:
        return self._allgather_obj('allgather_obj', obj)

    @collective
    def scatter_obj(self, objs: Sequence[Object] | None, root: int = 0) -> Object:
        pickled: list[Pickled] = []
        root = array_buffers.checked_root(root, self.size)
        if self.rank == root:
            if objs is None or len(objs) != self.size:
                raise ValueError(f'expected one object for each of the {self.size} ranks but got '
                                 f'{objs if objs is None else len(objs)}')
            pickled = [Pickled(obj) for obj in objs]
        lengths = [_nbytes(each, _SMALL) for each in pickled]
        number = max(lengths) if lengths and all(lengths) else 0
        length = self._consistency.numbers(pack('scatter_obj', root=root, number=number))[root]
        if not length:
            return self._messages.exchange(dict(enumerate(pickled)), [root])[0]
        sent = b''.join([each.stream.ljust(length) for each in pickled]) if pickled else None
        received = bytearray(length)
        self._arrays.Scatter(sent, received, root)
        return load(received, (), root, self.rank)

    @collective
    def allreduce_obj(self, obj: Object, op: str = 'sum') -> Object:
        objs = self._allgather_obj('allreduce_obj', obj, op)
        return functools.reduce(_OPS[op], objs)

    def _allgather_obj(self, operation: str, obj: Object, op: str | None = None
                       ) -> list[Object]:
        if operation == 'allreduce_obj':
            check_op(op)
        pickled = Pickled(obj)
        lengths = self._consistency.numbers(
            pack(operation, op=op or '', number=_nbytes(pickled, _SMALL)))
        if not all(lengths):
            ranks = range(self.size)
            return self._messages.exchange(dict.fromkeys(ranks, pickled), ranks)
        length = max(lengths)
        received = bytearray(length * self.size)
        self._arrays.Allgather(pickled.stream.ljust(length), received)
        return self._loaded(received, length)

    def _loaded(self, received: bytearray, length: int) -> list[Object]:
        """Unpickles the object of each rank from a buffer padded to equal lengths."""
        view = memoryview(received)
        return [load(view[source * length:(source + 1) * length], (), source, self.rank)
                for source in range(self.size)]


def _nbytes(pickled: Pickled, most: int) -> int:
    """The length of a pickle; 0 if it is longer than ``most`` or has out-of-band buffers."""
    nbytes = len(pickled.stream)
    return nbytes if nbytes <= most and not pickled.buffers else 0

