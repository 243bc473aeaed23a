"""Object operations: objects are pickled before the ranks compare their calls."""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from chainermn._collectives.inline_arrays import has_data
from chainermn._collectives.operation import Operations, operation
from chainermn._collectives.point_to_point import Messages
from chainermn._operations.call_signature import SIZE, pack, unpack
from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers
from chainermn._transport.elementwise import check_op
from chainermn._transport.pickling import Pickled, chunks, load
from chainermn._types import Buffer, Object

#: Largest pickle, in bytes, whose length is in the signature.
_SINGLE = 2**24

#: Largest pickle, in bytes, that all ranks exchange padded to the length of the longest.
_SMALL = 2**13

_OPS: dict[str, Callable[[Object, Object], Object]] = {
    'sum': operator.add, 'prod': operator.mul, 'max': max, 'min': min}


class ObjectOperations(Operations):
    """Object operations of a communicator on MPI."""

    _messages: Messages

    @operation
    def send_obj(self, obj: Object, dest: int, tag: int = 0) -> None:
        self._messages.send_obj(obj, dest, tag)

    @operation
    def recv_obj(self, source: int, status: MPI.Status | None = None, tag: int = -1
                 ) -> Object:
        # The value of ANY_TAG depends on the MPI library.
        return self._messages.recv_obj(source, MPI.ANY_TAG if tag == -1 else tag, status)

    @operation
    def bcast_obj(self, obj: Object, max_buf_len: int = 256 * 1024 * 1024, root: int = 0) -> Object:
        root = array_buffers.checked_root(root, self.size)
        pickled = Pickled(obj) if self.rank == root else None
        number = 0 if pickled is None else _nbytes(pickled, _SINGLE)
        data = pickled.stream if pickled is not None and (
            0 < number <= self._consistency.capacity) else b''
        message = self._consistency.bcast(
            pack('bcast_obj', (), None, root, '', False, number), root, data)
        if len(message) > SIZE:
            return obj if pickled is not None else load(message[SIZE:], (), root, self._rank)
        nbytes = unpack(message).number
        lengths = [nbytes] if nbytes else self._arrays.bcast(
            None if pickled is None else [part.nbytes for part in pickled.parts], root)
        parts = self._consistency.prepared(sum(lengths), lambda: [
            np.empty(length, np.uint8) for length in lengths
        ] if pickled is None else pickled.parts)
        for part in parts:
            for chunk in chunks(part):
                self._arrays.Bcast(chunk, root)
        return obj if pickled is not None else load(parts[0], parts[1:], root, self.rank)

    @operation
    def gather_obj(self, obj: Object, root: int = 0) -> list[Object] | None:
        return self._gathered('gather_obj', obj, array_buffers.checked_root(root, self.size))

    @operation
    def allgather_obj(self, obj: Object) -> list[Object]:
        return cast('list[Object]', self._gathered('allgather_obj', obj))

    @operation
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
        sent = b''.join([each.stream.ljust(number) for each in pickled]) if number else b''
        message = self._consistency.bcast(
            pack('scatter_obj', root=root, number=number), root,
            sent if len(sent) <= self._consistency.capacity else b'')
        length = unpack(message).number
        if not length:
            return self._messages.exchange(dict(enumerate(pickled)), [root])[0]
        if len(message) > SIZE:
            start = SIZE + length * self.rank
            received = message[start:start + length]
        else:
            received = bytearray(length)
            self._arrays.Scatter(sent or None, received, root)
        return load(received, (), root, self.rank)

    @operation
    def allreduce_obj(self, obj: Object, op: str = 'sum') -> Object:
        check_op(op)
        objs = cast('list[Object]', self._gathered('allreduce_obj', obj, op=op))
        try:
            return functools.reduce(_OPS[op], objs)
        except TypeError as error:
            raise TypeError(f'{error}. allreduce_obj cannot combine the objects with op={op!r}; '
                            'allgather_obj returns a list of them.') from error

    def _gathered(self, operation: str, obj: Object, root: int = -1, op: str = ''
                  ) -> list[Object] | None:
        """Return the objects of all ranks on the root, or on all ranks if there is none."""
        pickled, is_receiver = Pickled(obj), root in (-1, self._rank)
        number = _nbytes(pickled, _SMALL)
        messages = self._consistency.gather(
            pack(operation, (), None, root, op, False, number),
            pickled.stream if 0 < number <= self._consistency.capacity else b'')
        if has_data(messages):
            if not is_receiver:
                return None
            streams: Sequence[Buffer] = [message[SIZE:] for message in messages]
        else:
            lengths = [unpack(message).number for message in messages]
            if not all(lengths):
                dests = [root] if root >= 0 else range(self.size)
                objs = self._messages.exchange(dict.fromkeys(dests, pickled),
                                               range(self.size) if is_receiver else ())
                return objs if is_receiver else None
            streams = self._gathered_streams(pickled.stream, max(lengths), root)
        if not is_receiver:
            return None
        return [load(stream, (), source, self._rank) for source, stream in enumerate(streams)]

    def _gathered_streams(self, stream: bytes, length: int, root: int) -> list[memoryview]:
        """Gather pickles, padded to a length; with a root, the result is only valid there."""
        padded, received = stream.ljust(length), bytearray(length * self.size)
        if root < 0:
            self._arrays.Allgather(padded, received)
        else:
            self._arrays.Gather(padded, received if root == self.rank else None, root)
        view = memoryview(received)
        return [view[length * source:length * (source + 1)] for source in range(self.size)]


def _nbytes(pickled: Pickled, most: int) -> int:
    """Return the length of a pickle; 0 if it is longer than ``most`` or has out-of-band buffers."""
    nbytes = len(pickled.stream)
    return nbytes if nbytes <= most and not pickled.buffers else 0
