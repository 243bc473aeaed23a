"""Point to point: a header ahead of the payload, in one message where it fits.

Arrays and objects share one order, so a receiver that asks for the wrong kind learns it at once.
A sender whose argument was refused sends the refusal, which the receiver raises as well.
"""
from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI
from mpi4py.util import pkl5

from chainermn.communicators import _header, _wire
from chainermn.communicators._disagreement import Refusal
from chainermn.communicators._header import Header
from chainermn.communicators._pickled import Pickled, load

#: A payload of at most this many bytes travels with its header.
INLINE = 8192
_MAX_DIMS = 64  # of NumPy


class Messages:
    """Sends and receives on two duplicates of a communicator.

    Args:
        mpi_comm: For headers and arrays.  Nothing else may use its messages.
        objects: For large objects, likewise.
    """

    def __init__(self, mpi_comm: Any, objects: pkl5.Intracomm) -> None:
        self._mpi_comm = mpi_comm
        self._objects = objects
        self._to_self: list[Any] = []  # requests that hold what they send
        self._max_tag = mpi_comm.Get_attr(MPI.TAG_UB)

    def send(self, data: Any, dest: int, tag: int) -> None:
        """Sends an array or a sequence of arrays; returns once it is being received."""
        self._check(dest, tag, 'dest', wildcards=False)
        self._check_not_self(dest, 'dest')
        try:
            if isinstance(data, (tuple, list)):
                arrays = [_wire.checked(x) for x in data]
            else:
                arrays = [_wire.checked(data)]
        except Exception as error:
            self._refuse('send', error, dest, tag)
        if isinstance(data, (tuple, list)):
            self._mpi_comm.Ssend(_header.pack('send_tuple', number=len(arrays)), dest, tag)
        for x in arrays:
            self._send_array(x, dest, tag)

    def recv(self, source: int, tag: int) -> Any:
        """Receives an array or a tuple of arrays."""
        self._check(source, tag, 'source', wildcards=True)
        self._check_not_self(source, 'source')
        return self._recv(source, tag, ('send', 'send_tuple'), None)

    def send_obj(self, obj: Any, dest: int, tag: int) -> None:
        """Sends an object; may return before it is received."""
        self._check(dest, tag, 'dest', wildcards=False)
        try:
            pickled = Pickled(obj)
        except Exception as error:
            self._refuse('send_obj', error, dest, tag)
        inline = len(pickled.stream) <= INLINE and not pickled.buffers
        message = _header.pack('send_obj', number=inline) + (pickled.stream if inline else b'')
        if dest == self._mpi_comm.rank:  # a blocking send would wait for this rank to receive
            self._to_self = [request for request in self._to_self if not request.test()[0]]
            self._to_self.append(self._mpi_comm.Isend(message, dest, tag))
            if not inline:
                self._to_self.append(self._objects.isend(pickled, dest, tag))
            return
        self._mpi_comm.Send(message, dest, tag)
        if not inline:
            self._objects.send(pickled, dest, tag)

    def recv_obj(self, source: int, tag: int, status: MPI.Status | None) -> Any:
        """Receives an object."""
        self._check(source, tag, 'source', wildcards=True)
        return self._recv(source, tag, ('send_obj',), status)

    def _check(self, peer: Any, tag: Any, name: str, wildcards: bool) -> None:
        """Refuses a peer or a tag that cannot be; there is nobody to tell, so it raises here."""
        size = self._mpi_comm.size
        if not _is_int(peer) or not _is_int(tag):
            raise TypeError(f'{name} and tag have to be integers, not {peer!r} and {tag!r}')
        if not (0 <= peer < size or (wildcards and peer == MPI.ANY_SOURCE)):
            raise ValueError(f'{name} has to be a rank from 0 to {size - 1}, not {peer}')
        if not (0 <= tag <= self._max_tag or (wildcards and tag == MPI.ANY_TAG)):
            raise ValueError(f'tag has to be from 0 to {self._max_tag}, not {tag}')

    def _check_not_self(self, peer: int, name: str) -> None:
        if peer == self._mpi_comm.rank:
            raise ValueError(f'{name} is this rank itself, {peer}, which would wait for itself '
                             'forever')
        if self._mpi_comm.size == 1:
            raise ValueError('this rank is alone: there is nobody to send to or to receive from')

    def _refuse(self, verb: str, error: Exception, dest: int, tag: int) -> NoReturn:
        refusal = Refusal.of(verb, error)._replace(text=str(error)[:INLINE // 8])
        body = pickle.dumps(refusal)
        if dest != self._mpi_comm.rank:
            self._mpi_comm.Send(_header.pack(verb, refused=True, number=1) + body, dest, tag)
        raise self._error(refusal, self._mpi_comm.rank, dest, tag) from error

    def _error(self, refusal: Refusal, source: int, dest: int, tag: int) -> Exception:
        return refusal.error(f'{refusal.verb} from rank {source} to rank {dest} with tag {tag} '
                             f'refused; no data was sent\n  rank {source}: {refusal.text}')

    def _send_array(self, x: Any, dest: int, tag: int) -> None:
        head = _header.pack('send', x.shape, x.dtype, device=_wire.on_device(x))
        if x.ndim > _header.MAX_INLINE_DIMS:
            head += struct.pack(f'{x.ndim}q', *x.shape)
        payload = _wire.raw(_wire.to_buffer(x))
        if payload.nbytes <= INLINE and not _wire.on_device(payload):
            self._mpi_comm.Ssend(head + payload.tobytes(), dest, tag)
        else:
            self._mpi_comm.Ssend(head, dest, tag)
            self._mpi_comm.Send(payload, dest, tag)

    def _recv(self, source: int, tag: int, verbs: Sequence[str], status: MPI.Status | None) -> Any:
        """Receives the next message whole; raises if it is a refusal or of another kind."""
        header, body, source, tag = self._recv_header(source, tag, status)
        if header.refused:
            raise self._error(pickle.loads(body), source, self._mpi_comm.rank, tag)
        received: Any
        if header.verb == 'send':
            received = self._recv_array(header, body, source, tag)
        elif header.verb == 'send_tuple':
            received = tuple(self._recv_array(*self._recv_header(source, tag, None))
                             for _ in range(header.number))
        else:
            received = load(body) if header.number else self._objects.recv(None, source, tag)
        if header.verb not in verbs:
            raise TypeError(f'rank {source} sent its message with tag {tag} by send'
                            f'{"_obj" if header.verb == "send_obj" else ""}(); receive it with '
                            f'recv{"_obj" if header.verb == "send_obj" else ""}()')
        return received

    def _recv_header(self, source: int, tag: int, status: MPI.Status | None
                     ) -> tuple[Header, memoryview, int, int]:
        """Receives the next header and what came with it, and says from where."""
        status = MPI.Status() if status is None else status
        message = bytearray(_header.SIZE + 8 * _MAX_DIMS + INLINE)
        self._mpi_comm.Recv(message, source, tag, status)
        body = memoryview(message)[_header.SIZE:status.Get_count()]
        return _header.unpack(message), body, status.Get_source(), status.Get_tag()

    def _recv_array(self, header: Header, body: memoryview, source: int, tag: int) -> Any:
        shape = header.shape
        if header.ndim > _header.MAX_INLINE_DIMS:
            shape = struct.unpack_from(f'{header.ndim}q', body)
            body = body[8 * header.ndim:]
        if len(body) == math.prod(shape) * header.dtype.itemsize:
            buffer = np.frombuffer(body, header.dtype).copy()
        else:
            buffer = _wire.new_buffer(shape, header.dtype, header.device)
            self._mpi_comm.Recv(_wire.raw(buffer), source, tag)
        return _wire.from_buffer(buffer, shape, header.device)


def _is_int(value: Any) -> bool:
    return hasattr(value, '__index__') and not isinstance(value, bool)
