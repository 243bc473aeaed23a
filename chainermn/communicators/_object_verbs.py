"""The verbs on objects: pickled first, agreed on, then sent."""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from chainermn.communicators import _wire
from chainermn.communicators._agreement import Agreement
from chainermn.communicators._header import pack
from chainermn.communicators._messages import Messages
from chainermn.communicators._pickled import Pickled, load
from chainermn.communicators._reductions import check_op
from chainermn.communicators.communicator_base import CommunicatorBase

#: Bytes of a pickle that is broadcast as it is; pkl5 sends longer ones in pieces.
_IN_ONE_PIECE = 2**24

_OPS: dict[str, Callable[[Any, Any], Any]] = {
    'sum': operator.add, 'prod': operator.mul, 'max': max, 'min': min}


class ObjectVerbs(CommunicatorBase):
    """The part of a communicator on MPI that exchanges objects."""

    _agreement: Agreement
    _messages: Messages
    _arrays: Any
    _objects: Any

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._messages.send_obj(obj, dest, tag)

    def recv_obj(self, source: int, status: Any = None, tag: int = MPI.ANY_TAG) -> Any:
        return self._messages.recv_obj(source, tag, status)

    def bcast_obj(self, obj: Any, max_buf_len: int = 256 * 1024 * 1024, root: int = 0) -> Any:
        try:
            root = _wire.checked_root(root, self.size)
            pickled = Pickled(obj) if self.rank == root else None
        except Exception as error:
            self.refuse('bcast_obj', error)
        number = 0
        if pickled is not None and not pickled.buffers and len(pickled.stream) <= _IN_ONE_PIECE:
            number = len(pickled.stream)
        nbytes = self._agreement.exchange(pack('bcast_obj', root=root, number=number))[root].number
        if not nbytes:
            received = self._objects.bcast(pickled, root)
        elif pickled is not None:
            self._arrays.Bcast(pickled.stream, root)
        else:
            stream = bytearray(nbytes)
            self._arrays.Bcast(stream, root)
            received = load(stream)
        return obj if self.rank == root else received

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        try:
            root = _wire.checked_root(root, self.size)
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
            root = _wire.checked_root(root, self.size)
            if self.rank == root:
                if objs is None or len(objs) != self.size:
                    raise ValueError(f'scatter_obj takes one object for each of the {self.size} '
                                     f'ranks, but got {objs if objs is None else len(objs)}')
                pickled = [Pickled(obj) for obj in objs]
        except Exception as error:
            self.refuse('scatter_obj', error)
        self._agreement.same(pack('scatter_obj', root=root))
        return self._objects.scatter(pickled, root)

    def allreduce_obj(self, obj: Any, op: str = 'sum') -> Any:
        objs = self._allgather_obj('allreduce_obj', obj, op)
        return functools.reduce(_OPS[op], objs)

    def _allgather_obj(self, verb: str, obj: Any, op: str | None = None
                       ) -> list[Any]:
        try:
            if op is not None:
                check_op(op)
            pickled = Pickled(obj)
        except Exception as error:
            self.refuse(verb, error)
        self._agreement.same(pack(verb, op=op or ''))
        return self._objects.allgather(pickled)
