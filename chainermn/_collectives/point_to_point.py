"""Point to point: a header ahead of the payload, in one message where it fits.

Arrays and objects share one order, so a receiver that asks for the wrong kind learns it at once.
A sender whose argument was refused sends the refusal, which the receiver raises as well.

What does not fit beside the header follows on another communicator, under a number that the header
names and that no other message of this sender has.  So several messages with one tag can be on
their way at once.
"""
from __future__ import annotations

import functools
import math
import os
import pickle
import struct
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from chainermn import _signature, _streams
from chainermn._collectives import activations
from chainermn._collectives.activations import Mark
from chainermn._collectives.nonblocking import (
    Receive,
    Receives,
    Request,
    blocking,
    largest_tag,
    non_blocking,
)
from chainermn._collectives.payloads import Payloads
from chainermn._consistency.mismatch import Refusal
from chainermn._diagnostics import call_site, unusable
from chainermn._diagnostics.deadlock import Deadlocks, Wait
from chainermn._diagnostics.flight_recorder import Calls, MessageCalls
from chainermn._signature import Header
from chainermn._transport import array_buffers
from chainermn._transport.pending import Pending
from chainermn._transport.pickling import Pickled, load

#: A payload of at most this many bytes travels with its header.
INLINE = 8192
_MAX_MESSAGE = (  # NumPy has up to 64 dimensions
    activations.MAX_SIZE + _signature.SIZE + 64 * 8 + INLINE)

_POLLS = 20  # for the acknowledgment of a message that was received
_SHOWN = 20  # messages without a counterpart


class Messages:
    """Sends and receives on two duplicates of a communicator.

    Args:
        mpi_comm: For headers, with the tags of the user.  Nothing else may use its messages.
        payloads: For what follows them, likewise.
    """

    def __init__(self, mpi_comm: Any, payloads: Any) -> None:
        self._mpi_comm = mpi_comm
        self.calls = MessageCalls(mpi_comm)
        self._payloads = Payloads(payloads)
        self.rank, self._size = mpi_comm.rank, mpi_comm.size
        self._max_tag = largest_tag()
        self.deadlocks = Deadlocks(payloads, self._payloads.notices, self.calls)
        self.pending = Pending()
        self._receives: list[Request] = []
        self._messages: list[bytearray] = []  # to receive into
        unusable.know(self)

    def send(self, data: Any, dest: int, tag: int) -> None:
        """Sends an array or a sequence of arrays; returns once it is being received."""
        self._check_other(dest, tag, 'dest', wildcards=False)
        calls = self.calls
        calls.count += 1
        # The shortest way, for most messages.
        if array_buffers.is_plain(data) and data.nbytes <= INLINE and (
                data.ndim <= _signature.MAX_INLINE_DIMS):
            head = _signature.pack('send', data.shape, data.dtype)
            calls.keep(('send', dest, tag, head))
            calls.sent[dest, tag] += 1
            self._ssend(head + data.tobytes(), dest, tag)
            return
        calls.keep(('send', dest, tag, None))
        first, number, rest = self._parts('send', data, dest, tag)
        calls.sent[dest, tag] += 1
        self._ssend(first, dest, tag)
        self._send_rest(rest, dest, number)

    def isend(self, data: Any, dest: int, tag: int) -> Request:
        """Begins to send an array or a sequence of arrays."""
        self._check(dest, tag, 'dest', wildcards=False)
        self._began('isend', dest, tag)
        name, site = f'isend to rank {dest} with tag {tag}', call_site.site()
        first, number, rest = self._parts('isend', data, dest, tag)
        self.calls.sent[dest, tag] += 1
        # The first one is synchronous, to know at the end of the program whether it was received;
        # the others are copied, as the receiver takes them only in wait() or test().
        sends = [self._mpi_comm.Issend(first, dest, tag)]
        for part in rest:
            sent = part if isinstance(part, bytes) else array_buffers.copied(part)
            sends.append(self._payloads.mpi_comm.Isend(sent, dest, number))
        self.pending.keep(f'{name}, called at {site}', sends)
        return Request(name, site, iter(()), self._are_others,
                       functools.partial(self._began, 'wait', dest, tag))

    def recv(self, source: int, tag: int) -> Any:
        """Receives an array or a tuple of arrays."""
        self._check_other(source, tag, 'source', wildcards=True)
        calls = self.calls
        calls.count += 1
        calls.keep(('recv', source, tag, None))
        if source < 0 or tag < 0 or self._receives:
            return blocking(self._receive(source, tag, 'send'), self._wait)
        message = self._messages.pop() if self._messages else bytearray(_MAX_MESSAGE)
        self._mpi_comm.Recv(message, source, tag)
        head = bytes(message[:_signature.SIZE])
        array = _array_with(head)
        if array is None:
            body = memoryview(message)[_signature.SIZE:]
            return blocking(self._finish_plain(_signature.unpack(head), body, source, tag, 'send'),
                            self._wait)
        x = np.ndarray(*array, message, _signature.SIZE).copy()
        calls.received[source, tag] += 1
        self._messages.append(message)  # for the next one
        return x

    def irecv(self, source: int, tag: int) -> Request:
        """Begins to receive an array or a tuple of arrays."""
        self._check(source, tag, 'source', wildcards=True)
        self._began('irecv', source, tag)
        request = Request(
            f'irecv from {"any rank" if source == MPI.ANY_SOURCE else f"rank {source}"} with '
            f'{"any tag" if tag == MPI.ANY_TAG else f"tag {tag}"}', call_site.site(),
            non_blocking(self._receive(source, tag, 'send')), self._are_others,
            functools.partial(self._began, 'wait', source, tag))
        self.receiving().append(request)
        return request

    def send_obj(self, obj: Any, dest: int, tag: int) -> None:
        """Sends an object; may return before it is received."""
        self._check(dest, tag, 'dest', wildcards=False)
        self._began('send_obj', dest, tag)
        try:
            pickled = Pickled(obj)
        except Exception as error:
            self._refuse('send_obj', error, dest, tag)
        inline = len(pickled.stream) <= INLINE and not pickled.buffers
        number = -1 if inline else self._payloads.new_number()
        first = _signature.pack('send_obj', root=number) + (pickled.stream if inline else b'')
        self.calls.sent[dest, tag] += 1
        rest = () if inline else pickled.messages()
        if dest == self.rank:  # a blocking send would wait for this rank to receive
            self.pending.keep(
                f'send_obj to rank {dest} with tag {tag}, called at {call_site.site()}',
                [self._mpi_comm.Issend(first, dest, tag),
                 *[self._payloads.mpi_comm.Isend(message, dest, number) for message in rest]])
            return
        self._mpi_comm.Send(first, dest, tag)
        self._send_rest(rest, dest, number)

    def recv_obj(self, source: int, tag: int, status: MPI.Status | None) -> Any:
        """Receives an object."""
        self._check(source, tag, 'source', wildcards=True)
        self._began('recv_obj', source, tag)
        return blocking(self._receive(source, tag, 'send_obj', status), self._wait)

    def send_marked(self, verb: str, mark: Mark, data: Any, dest: int, tag: int) -> None:
        """Sends an array or a sequence of arrays after a mark, as :meth:`send` does."""
        self._check_other(dest, tag, 'dest', wildcards=False)
        self._began(verb, dest, tag)
        first, number, rest = self._parts(verb, data, dest, tag)
        self.calls.sent[dest, tag] += 1
        self.deadlocks.n_marked_sent[dest] += 1
        request = self._mpi_comm.Issend(mark.packed() + first, dest, tag)
        try:
            self.deadlocks.wait(request, dest, Wait(True, tag, mark.text), self.receiving)
        except BaseException:
            self.pending.keep(mark.text, [request])
            raise
        self._send_rest(rest, dest, number)

    def recv_marked(self, verb: str, source: int, tag: int, call: str
                    ) -> tuple[Mark | None, Any, int, int]:
        """Receives an array or a tuple of arrays, with a mark or without.

        Returns:
            The mark or ``None``, the data, the sender and the tag.
        """
        self._check_other(source, tag, 'source', wildcards=True)
        self._began(verb, source, tag)
        status = MPI.Status()
        message = bytearray(_MAX_MESSAGE)
        request = self._mpi_comm.Irecv(message, source, tag)
        if source < 0:
            self._wait(request, status)
        else:
            try:
                self.deadlocks.wait(
                    request, source, Wait(False, tag, call), self.receiving, status)
            except BaseException:
                request.Cancel()
                request.Wait()
                raise
        source, tag = status.Get_source(), status.Get_tag()
        body = memoryview(message)[_signature.SIZE:status.Get_count()]
        mark, data = blocking(
            self._finish(_signature.unpack(message), body, source, tag, 'send'), self._wait)
        return mark, data, source, tag

    def exchange(self, pickled: Mapping[int, Pickled], sources: Iterable[int]) -> list[Any]:
        """Exchanges objects in a collective call; see `Payloads.exchange`."""
        return self._payloads.exchange(pickled, sources, self._wait)

    def warn_of_unmatched(self) -> None:
        """Names messages without a counterpart on stderr, once no rank sends or receives more."""
        n_polls = 0
        while (calls := self._unmatched()) and n_polls < _POLLS:
            n_polls += 1
            time.sleep(1e-3)
        if calls:
            more = [f'and {len(calls) - _SHOWN} more'] if len(calls) > _SHOWN else []
            _streams.write('\n  '.join([
                f'chainermn: {self.calls.name}, rank {self.rank}: messages without a counterpart:',
                *calls[:_SHOWN], *more]) + '\n')

    def _unmatched(self) -> list[str]:
        return [f'{call}: never received' for call in self.pending.calls()] + [
            f'{request.call}: nothing was sent' for request in self.receiving()]

    def receiving(self) -> list[Request]:
        """The requests for which nothing has come yet, or not all of it; lets them go on."""
        self._receives = [request for request in self._receives if not request.test()]
        return self._receives

    def give_up(self, unusable: Any) -> None:
        """Makes every message from now on raise, and who waits for one."""
        for request in self._receives:
            request.give_up(unusable)
        self._mpi_comm = self._payloads = self.calls = unusable

    def _are_others(self, request: Request) -> bool:
        return any(other is not request for other in self.receiving())

    def _began(self, verb: str, peer: int, tag: int) -> Calls:
        calls = self.calls
        calls.count += 1
        calls.keep((verb, peer, tag, None))
        return calls

    def _ssend(self, message: bytes, dest: int, tag: int) -> None:
        if self._receives:
            self._wait(self._mpi_comm.Issend(message, dest, tag))
        else:
            self._mpi_comm.Ssend(message, dest, tag)

    def _wait(self, request: MPI.Request, status: MPI.Status | None = None) -> None:
        """Blocks for a message, while what irecv has begun to receive goes on.

        Otherwise this rank could wait for one that waits for a large array of its own to be taken.
        """
        while self.receiving():
            if request.Test(status):
                return
            os.sched_yield()
        request.Wait(status)

    def _send_rest(self, messages: Iterable[Any], dest: int, number: int) -> None:
        """Sends what follows a header, to a rank that receives it."""
        for message in messages:
            if self._receives:
                self._wait(self._payloads.mpi_comm.Isend(message, dest, number))
            else:
                self._payloads.mpi_comm.Send(message, dest, number)

    def _check(self, peer: Any, tag: Any, name: str, wildcards: bool) -> None:
        """Refuses a peer or a tag that cannot be; there is nobody to tell, so it raises here."""
        if not _is_int(peer) or not _is_int(tag):
            raise TypeError(f'{name} and tag have to be integers, not {peer!r} and {tag!r}')
        if not (0 <= peer < self._size or (wildcards and peer == MPI.ANY_SOURCE)):
            raise ValueError(f'{name} has to be a rank from 0 to {self._size - 1}, not {peer}')
        if not (0 <= tag <= self._max_tag or (wildcards and tag == MPI.ANY_TAG)):
            raise ValueError(f'tag has to be from 0 to {self._max_tag}, not {tag}')

    def _check_other(self, peer: Any, tag: Any, name: str, wildcards: bool) -> None:
        """Refuses this rank itself as well."""
        if type(peer) is int and peer != self.rank and type(tag) is int and (
                0 <= peer < self._size and 0 <= tag <= self._max_tag):
            return
        self._check(peer, tag, name, wildcards)
        if peer == self.rank:
            raise ValueError(f'{name} is this rank itself, {peer}, which would wait for itself '
                             'forever')
        if self._size == 1:
            raise ValueError('this rank is alone: there is nobody to send to or to receive from')

    def _refuse(self, verb: str, error: Exception, dest: int, tag: int) -> NoReturn:
        refusal = Refusal.of(verb, error)._replace(text=str(error)[:INLINE // 8])
        message = _signature.pack('send', refused=True) + pickle.dumps(refusal)
        self.calls.sent[dest, tag] += 1
        if dest == self.rank:  # a blocking send would wait for this rank to receive
            self.pending.keep(f'{verb} to rank {dest} with tag {tag}, which was refused',
                               [self._mpi_comm.Isend(message, dest, tag)])
        else:
            self._mpi_comm.Send(message, dest, tag)
        raise self._error(refusal, self.rank, dest, tag) from error

    def _error(self, refusal: Refusal, source: int, dest: int, tag: int) -> Exception:
        return refusal.error(f'{refusal.verb} from rank {source} to rank {dest} with tag {tag} '
                             f'refused; no data was sent\n  rank {source}: {refusal.text}')

    def _parts(self, verb: str, data: Any, dest: int, tag: int) -> tuple[Any, int, list[Any]]:
        """The message with the user's tag, and those that follow under a number."""
        is_one = not isinstance(data, (tuple, list))
        try:
            arrays = [array_buffers.checked(x) for x in ([data] if is_one else data)]
        except Exception as error:
            self._refuse(verb, error, dest, tag)
        payloads = [array_buffers.raw(array_buffers.to_buffer(x)) for x in arrays]
        if is_one and _is_inline(payloads[0]):
            return _head(arrays[0], -1) + payloads[0].tobytes(), -1, []
        number = self._payloads.new_number()
        if is_one:
            return _head(arrays[0], number), number, payloads
        rest: list[Any] = []
        for x, payload in zip(arrays, payloads, strict=True):
            rest += [_head(x, -1) + payload.tobytes()] if _is_inline(payload) else [
                _head(x, number), payload]
        return _signature.pack('send_tuple', root=number, number=len(arrays)), number, rest

    def _receive(self, source: int, tag: int, verb: str, status: MPI.Status | None = None
                 ) -> Receives:
        """Receives the next message whole; raises if it is a refusal or of another kind."""
        status = MPI.Status() if status is None else status
        header, body = yield from _receive_header(self._mpi_comm, source, tag, status)
        return (yield from self._finish_plain(
            header, body, status.Get_source(), status.Get_tag(), verb))

    def _finish_plain(self, header: Header, body: memoryview, source: int, tag: int, verb: str
                      ) -> Receives:
        """Receives what follows a header, for an operation that takes data with a mark as well."""
        mark, received = yield from self._finish(header, body, source, tag, verb)
        if mark is not None and mark.kind == 'gradient':
            raise activations.unexpected(
                self.rank, mark, source,
                f'recv from rank {source} with tag {tag}, called at {call_site.site()}')
        return received

    def _finish(self, header: Header, body: memoryview, source: int, tag: int, verb: str
                ) -> Receives:
        """Receives what follows a header and what came with it; gives the mark, if any, too."""
        try:
            return (yield from self._rest(header, body, source, tag, verb))
        finally:
            self.calls.received[source, tag] += 1

    def _rest(self, header: Header, body: memoryview, source: int, tag: int, verb: str
              ) -> Receives:
        mark = None
        if header.verb in ('activation', 'gradient'):
            self.deadlocks.n_marked_received[source] += 1
            mark, body = Mark.unpack(header.verb, body)
            header, body = _signature.unpack(body), body[_signature.SIZE:]
        if header.refused:
            raise self._error(pickle.loads(body), source, self.rank, tag)
        kind, number = header.verb, header.root
        received: Any
        if kind == 'send_obj':
            received = load(body, (), source, self.rank) if number < 0 else (
                yield from self._payloads.receive_object(source, number))
        elif kind == 'send':
            received = yield from self._receive_array(header, body, source, number)
        else:
            arrays, failure = [], None
            for _ in range(header.number):
                header, body = yield from _receive_header(
                    self._payloads.mpi_comm, source, number, MPI.Status())
                try:
                    arrays.append((yield from self._receive_array(header, body, source, number)))
                except MemoryError as error:  # the sender waits until the others are received, too
                    failure = failure or error
            if failure is not None:
                raise failure
            received = tuple(arrays)
        if (kind == 'send_obj') != (verb == 'send_obj'):
            raise TypeError(f'rank {source} sent its message with tag {tag} by send'
                            f'{"_obj" if kind == "send_obj" else ""}(); receive it with '
                            f'recv{"_obj" if kind == "send_obj" else ""}()')
        return mark, received

    def _receive_array(self, header: Header, body: memoryview, source: int, number: int
                       ) -> Receives:
        shape = header.shape
        if header.ndim > _signature.MAX_INLINE_DIMS:
            shape = struct.unpack_from(f'{header.ndim}q', body)
            body = body[8 * header.ndim:]
        if header.root < 0:
            buffer = np.frombuffer(body, header.dtype, math.prod(shape)).copy()
        else:
            buffer = yield from self._payloads.receive_array(
                shape, header.dtype, header.device, source, number)
        return array_buffers.from_buffer(buffer, shape, header.device)


def _receive_header(mpi_comm: Any, source: int, tag: int, status: MPI.Status) -> Receives:
    """Receives the next header and what came with it."""
    message = bytearray(_MAX_MESSAGE)
    yield Receive(mpi_comm, message, source, tag, status)
    return _signature.unpack(message), memoryview(message)[_signature.SIZE:status.Get_count()]


def _head(x: Any, number: int) -> bytes:
    """The header of an array, with its shape where that is long."""
    head = _signature.pack('send', x.shape, x.dtype, number, '', array_buffers.on_device(x))
    if x.ndim <= _signature.MAX_INLINE_DIMS:
        return head
    return head + struct.pack(f'{x.ndim}q', *x.shape)


@functools.lru_cache(maxsize=4096)
def _array_with(head: bytes) -> tuple[tuple[int, ...], np.dtype] | None:
    """Shape and dtype of an array on the host, if all of it came with this header."""
    header = _signature.unpack(head)
    if header.verb != 'send' or header.root >= 0 or header.refused or header.device or (
            header.ndim > _signature.MAX_INLINE_DIMS):
        return None
    return header.shape, header.dtype


def _is_inline(payload: Any) -> bool:
    return payload.nbytes <= INLINE and not array_buffers.on_device(payload)


def _is_int(value: Any) -> bool:
    return hasattr(value, '__index__') and not isinstance(value, bool)
