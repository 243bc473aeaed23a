"""The operations on objects: pickled first, agreed on, then sent."""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from chainermn._collectives.operation import Operations, collective
from chainermn._collectives.point_to_point import Messages
from chainermn._signature import pack
from chainermn._transport import array_buffers
from chainermn._transport.elementwise import check_op
from chainermn._transport.pickling import Pickled, load, pieces

#: Bytes of a pickle that is broadcast without another exchange.
_IN_ONE_PIECE = 2**24

#: Bytes of pickles that all ranks exchange as they are, padded to the longest of them.
_SMALL = 2**13

_OPS: dict[str, Callable[[Any, Any], Any]] = {
    'sum': operator.add, 'prod': operator.mul, 'max': max, 'min': min}


class ObjectOperations(Operations):
    """The part of a communicator on MPI that exchanges objects."""

    _messages: Messages

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._messages.send_obj(obj, dest, tag)

    def recv_obj(self, source: int, status: Any = None, tag: int = MPI.ANY_TAG) -> Any:
        return self._messages.recv_obj(source, tag, status)

    @collective
    def bcast_obj(self, obj: Any, max_buf_len: int = 256 * 1024 * 1024, root: int = 0) -> Any:
        try:
            root = array_buffers.checked_root(root, self.size)
            pickled = Pickled(obj) if self.rank == root else None
        except Exception as error:
            self.refuse('bcast_obj', error)
        number = 0 if pickled is None else _nbytes(pickled, _IN_ONE_PIECE)
        nbytes = self._agreement.numbers(pack('bcast_obj', root=root, number=number))[root]
        parts = self._room_for_parts(pickled, root) if not nbytes else [
            np.empty(nbytes, np.uint8)] if pickled is None else pickled.parts
        for part in parts:
            for piece in pieces(part):
                self._arrays.Bcast(piece, root)
        return obj if pickled is not None else load(parts[0], parts[1:], root, self.rank)

    def _room_for_parts(self, pickled: Pickled | None, root: int) -> list[Any]:
        """The root's parts, and room for them on the other ranks; raises if one has none."""
        lengths = self._arrays.bcast(
            None if pickled is None else [part.nbytes for part in pickled.parts], root)
        try:
            parts = [np.empty(length, np.uint8) for length in lengths
                     ] if pickled is None else pickled.parts
        except Exception as error:
            self.refuse('bcast_obj', error)
        self._agreement.same(pack('bcast_obj', root=root))
        return parts

    @collective
    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        try:
            root = array_buffers.checked_root(root, self.size)
            pickled = Pickled(obj)
        except Exception as error:
            self.refuse('gather_obj', error)
        lengths = self._agreement.numbers(
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
    def allgather_obj(self, obj: Any) -> list[Any]:
        return self._allgather_obj('allgather_obj', obj)

    @collective
    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        pickled: list[Pickled] = []
        try:
            root = array_buffers.checked_root(root, self.size)
            if self.rank == root:
                if objs is None or len(objs) != self.size:
                    raise ValueError(f'scatter_obj takes one object for each of the {self.size} '
                                     f'ranks, but got {objs if objs is None else len(objs)}')
                pickled = [Pickled(obj) for obj in objs]
        except Exception as error:
            self.refuse('scatter_obj', error)
        lengths = [_nbytes(each, _SMALL) for each in pickled]
        number = max(lengths) if lengths and all(lengths) else 0
        length = self._agreement.numbers(pack('scatter_obj', root=root, number=number))[root]
        if not length:
            return self._messages.exchange(dict(enumerate(pickled)), [root])[0]
        sent = b''.join([each.stream.ljust(length) for each in pickled]) if pickled else None
        received = bytearray(length)
        self._arrays.Scatter(sent, received, root)
        return load(received, (), root, self.rank)

    @collective
    def allreduce_obj(self, obj: Any, op: str = 'sum') -> Any:
        objs = self._allgather_obj('allreduce_obj', obj, op)
        return functools.reduce(_OPS[op], objs)

    def _allgather_obj(self, verb: str, obj: Any, op: str | None = None
                       ) -> list[Any]:
        try:
            if verb == 'allreduce_obj':
                check_op(op)
            pickled = Pickled(obj)
        except Exception as error:
            self.refuse(verb, error)
        lengths = self._agreement.numbers(
            pack(verb, op=op or '', number=_nbytes(pickled, _SMALL)))
        if not all(lengths):
            ranks = range(self.size)
            return self._messages.exchange(dict.fromkeys(ranks, pickled), ranks)
        length = max(lengths)
        received = bytearray(length * self.size)
        self._arrays.Allgather(pickled.stream.ljust(length), received)
        return self._loaded(received, length)

    def _loaded(self, received: bytearray, length: int) -> list[Any]:
        """Unpickles an object of each rank, each from as many bytes, not all of which count."""
        view = memoryview(received)
        return [load(view[source * length:(source + 1) * length], (), source, self.rank)
                for source in range(self.size)]


def _nbytes(pickled: Pickled, most: int) -> int:
    """Bytes of a pickle that travels as it is; 0 if it is too long or has buffers beside it."""
    nbytes = len(pickled.stream)
    return nbytes if nbytes <= most and not pickled.buffers else 0

