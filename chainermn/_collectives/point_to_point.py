"""Point-to-point messages: a header and, if it is small, the payload, in one MPI message.

Messages arrive in the order sent, whatever their kind; receiving the wrong kind raises an error
immediately. If an argument of the sender is invalid, the sender sends the error instead, and the
receiver raises it as well.

A large payload follows on another MPI communicator. Its tag is a number from the header, unique to
the message, so that several messages with the same tag can be in flight, even from several threads.
"""
from __future__ import annotations

import contextlib
import functools
import os
import pickle
import time
from collections.abc import Iterable, Mapping
from typing import NoReturn

import numpy as np

from chainermn._collectives import message_parts
from chainermn._collectives.message_parts import (
    INLINE,
    MAX_SIZE,
    PICKLE,
    FirstPart,
    Mark,
    plain_array_in,
    split,
)
from chainermn._collectives.nonblocking import (
    Pending,
    Receives,
    Request,
    blocking,
    non_blocking,
)
from chainermn._collectives.payloads import Payloads
from chainermn._consistency import tags
from chainermn._consistency.mismatch import RemoteError
from chainermn._consistency.signature_exchange import SPINS_IF_OVERSUBSCRIBED, wait
from chainermn._diagnostics import call_site, unusable
from chainermn._diagnostics.flight_recorder import MessageRecord
from chainermn._diagnostics.unusable import Unusable
from chainermn._operations import message_header
from chainermn._operations.arguments import is_integer
from chainermn._operations.message_header import IN_MESSAGE, Kind
from chainermn._process import streams
from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers, pickling
from chainermn._transport.pickling import Pickled, dump, load
from chainermn._types import Array, Arrays, Object, ReceivedArrays

_POLLS = 20  # polls for the acknowledgment of a message that was received
_SHOWN = 20  # unmatched messages that are listed


class Messages:
    """Sends and receives on two duplicates of a communicator.

    Args:
        mpi_comm: The duplicate for headers, with the user's tags. Nothing else may send on it.
        payloads: The duplicate for payloads. Nothing else may send on it.
        spins: The number of polls for a message before this rank yields its core.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, payloads: MPI.Intracomm,
                 spins: int = SPINS_IF_OVERSUBSCRIBED) -> None:
        self._mpi_comm, self._spins = mpi_comm, spins
        self.record = MessageRecord(mpi_comm)
        self._payloads = Payloads(payloads)
        self.rank, self._size = mpi_comm.rank, mpi_comm.size
        self._max_tag, self._any_tag = tags.largest_tag(), MPI.ANY_TAG
        self.pending = Pending()
        self._receives: list[Request[ReceivedArrays]] = []
        self._messages: list[bytearray] = []  # buffers to receive into
        unusable.register(self)

    def send(self, data: Arrays, dest: int, tag: int) -> None:
        """Send an array or a sequence of arrays; return once the receiver has begun to receive."""
        self._check_other(dest, tag, 'dest', wildcards=False)
        # Fast path, for most messages.
        if array_buffers.is_plain(data) and data.nbytes <= INLINE:
            head = message_header.of_array(data.shape, data.dtype)
            record = self.record
            record.add_message('send', dest, tag, head)
            record.sent[dest, tag] += 1  # as in count_sent
            record.sent_at = record.count
            if self._receives:
                self._ssend(head + data.tobytes(), dest, tag)
            else:
                self._mpi_comm.Ssend(head + data.tobytes(), dest, tag)
            return
        self._began('send', dest, tag)
        first, number, rest = self._parts('send', data, dest, tag)
        self.record.count_sent(dest, tag)
        self._ssend(first, dest, tag)
        self._send_rest(rest, dest, number)

    def isend(self, data: Arrays, dest: int, tag: int, caller: str = '') -> Request[None]:
        """Start to send an array or a sequence of arrays."""
        self._check(dest, tag, 'dest', wildcards=False)
        self._began('isend', dest, tag, caller)
        name, site = f'isend to rank {dest} with tag {tag}', call_site.locate()
        # The parts are copied, because the receiver receives them only in wait() or test().
        first, number, rest = self._parts('isend', data, dest, tag, copies=True)
        self.record.count_sent(dest, tag)
        # The first message is synchronous, so that unreceived messages can be reported at the end.
        sends = [self._mpi_comm.Issend(first, dest, tag)]
        sends += [self._payloads.mpi_comm.Isend(part, dest, number) for part in rest]
        self.pending.record(f'{name}, called at {site}', sends)
        return Request(name, site, iter(()), self._has_other_receives,
                       functools.partial(
                           self._began, 'wait', dest, tag, caller or f'the isend at {site}'))

    def recv(self, source: int, tag: int) -> ReceivedArrays:
        """Receive an array or a tuple of arrays."""
        self._check_other(source, tag, 'source', wildcards=True)
        record = self.record
        record.add_message('recv', source, tag)
        if source < 0 or tag < 0 or self._receives:
            return blocking(self._receive(source, tag, 'send'), self._wait)
        message = self._new_message()
        try:
            wait(self._mpi_comm.Irecv(message, source, tag), None, self._spins)
        except MPI.Exception:
            raise
        except BaseException:  # raised by a signal handler; the sender waits for the rest
            blocking(self._finish_plain(split(message), source, tag, 'send'), self._wait)
            raise
        array = plain_array_in(bytes(message[:message_header.SIZE]))
        if array is None:
            return blocking(self._finish_plain(split(message), source, tag, 'send'), self._wait)
        x = np.ndarray(*array, message, message_header.SIZE).copy()
        record.received[source, tag] += 1
        self._messages.append(message)  # for reuse
        return x

    def irecv(self, source: int, tag: int, caller: str = '') -> Request[ReceivedArrays]:
        """Start to receive an array or a tuple of arrays."""
        self._check(source, tag, 'source', wildcards=True)
        self._began('irecv', source, tag, caller)
        site = call_site.locate()
        request: Request[ReceivedArrays] = Request(
            f'irecv from {"any rank" if source == MPI.ANY_SOURCE else f"rank {source}"} with '
            f'{"any tag" if tag == MPI.ANY_TAG else f"tag {tag}"}', site,
            non_blocking(self._receive(source, tag, 'send')), self._has_other_receives,
            functools.partial(
                self._began, 'wait', source, tag, caller or f'the irecv at {site}'))
        self.receiving().append(request)
        return request

    def send_obj(self, obj: Object, dest: int, tag: int) -> None:
        """Send an object; may return before the receiver has received it."""
        if not (type(dest) is int is type(tag) and 0 <= dest < self._size
                and 0 <= tag <= self._max_tag):
            self._check(dest, tag, 'dest', wildcards=False)
        record = self.record
        record.add_message('send_obj', dest, tag)
        try:
            first, buffers = dump(obj)
        except Exception as error:
            self._fail_send('send_obj', error, dest, tag)
        record.sent[dest, tag] += 1  # as in count_sent
        record.sent_at = record.count
        number = IN_MESSAGE
        rest: Iterable[Array | bytes] = ()
        if len(first) > INLINE or buffers or first[0] != PICKLE:  # pickled by an old protocol
            number, rest = self._payloads.new_number(), pickling.messages(first, buffers)
            first = message_header.of_object(number)
        elif dest != self.rank:  # fast path, for most messages
            self._mpi_comm.Send(first, dest, tag)
            return
        if dest == self.rank:  # a blocking send would wait for this rank to receive
            self.pending.record(
                f'send_obj to rank {dest} with tag {tag}, called at {call_site.locate()}',
                [self._mpi_comm.Issend(first, dest, tag),
                 # Copies, because user code may change its arrays before it receives them.
                 *[self._payloads.mpi_comm.Isend(bytes(message), dest, number)
                   for message in rest]])
            return
        self._mpi_comm.Send(first, dest, tag)
        self._send_rest(rest, dest, number)

    def recv_obj(self, source: int, tag: int, status: MPI.Status | None) -> Object:
        """Receive an object."""
        if status is not None and not isinstance(status, MPI.Status):
            raise TypeError(f'status must be an mpi4py.MPI.Status, not {status!r}' + (
                f'; pass the tag by keyword, tag={status}' if isinstance(status, int) else ''))
        if not (type(source) is int is type(tag) and 0 <= source < self._size
                and (0 <= tag <= self._max_tag or tag == self._any_tag)):
            self._check(source, tag, 'source', wildcards=True)
        record = self.record
        record.add_message('recv_obj', source, tag)
        if source < 0 or self._receives:
            return blocking(self._receive(source, tag, 'send_obj', status), self._wait)
        # Fast path, for most messages.
        status = MPI.Status() if status is None else status
        message = self._new_message()
        wait(self._mpi_comm.Irecv(message, source, tag), status, self._spins)
        tag = status.tag
        if message[0] != PICKLE:
            return blocking(self._finish_plain(split(message, status), source, tag, 'send_obj'),
                            self._wait)
        try:
            obj = load(message, (), source, self.rank)
        finally:
            record.received[source, tag] += 1  # after unpickling, which may take long
        self._messages.append(message)  # for reuse
        return obj

    def send_marked(self, operation: str, mark: Mark, data: Arrays, dest: int, tag: int,
                    caller: str = '') -> None:
        """Send a mark, followed by an array or a sequence of arrays as in :meth:`send`."""
        self._check_other(dest, tag, 'dest', wildcards=False)
        self._began(operation, dest, tag, caller)
        first, number, rest = self._parts(operation, data, dest, tag)
        self.record.count_sent(dest, tag)
        self._ssend(mark.packed() + first, dest, tag)
        self._send_rest(rest, dest, number)

    def recv_marked(self, operation: str, source: int, tag: int, caller: str = ''
                    ) -> tuple[Mark | None, Arrays, int, int]:
        """Receive an array or a tuple of arrays, with or without a mark.

        Returns:
            The mark or ``None``, the data, the sender and the tag.
        """
        self._check_other(source, tag, 'source', wildcards=True)
        self._began(operation, source, tag, caller)
        status = MPI.Status()
        message = blocking(message_parts.receive(self._mpi_comm, source, tag, status), self._wait)
        source, tag = status.Get_source(), status.Get_tag()
        data = blocking(self._finish(message, source, tag, 'send'), self._wait)
        return message.mark, data, source, tag

    def exchange_objects(self, pickled: Mapping[int, Pickled], sources: Iterable[int]
                         ) -> list[Arrays]:
        """Exchange objects in a collective call; see `Payloads.exchange_objects`."""
        return self._payloads.exchange_objects(pickled, sources, self._wait)

    def warn_of_unmatched(self) -> None:
        """Report sends and receives without a counterpart on stderr, after all communication."""
        n_polls = 0
        while (calls := self._unmatched()) and n_polls < _POLLS:
            n_polls += 1
            time.sleep(1e-3)
        if calls:
            more = [f'and {len(calls) - _SHOWN} more'] if len(calls) > _SHOWN else []
            streams.write('\n  '.join([
                f'chainermn: {self.record.name}, rank {self.rank}: unmatched sends and receives:',
                *calls[:_SHOWN], *more]) + '\n')

    def _unmatched(self) -> list[str]:
        return [f'{call}: never received' for call in self.pending.calls()] + [
            f'{request.call}: no message was sent' for request in self.receiving()]

    def receiving(self) -> list[Request[ReceivedArrays]]:
        """Make progress with the requests of irecv; return the incomplete ones."""
        for request in self._receives[:]:
            if request.test():
                with contextlib.suppress(ValueError):  # another thread has removed it
                    self._receives.remove(request)
        return self._receives

    def _make_unusable(self, unusable: Unusable) -> None:
        """Make every later operation and every incomplete request raise an error."""
        for request in self._receives:
            request._make_unusable(unusable)
        for name in ('_mpi_comm', '_payloads', 'record'):
            setattr(self, name, unusable)

    def _new_message(self) -> bytearray:
        try:
            return self._messages.pop()
        except IndexError:
            return bytearray(MAX_SIZE)

    def _has_other_receives(self, request: Request[object]) -> bool:
        """Make progress with the requests of irecv; return whether others are incomplete."""
        return any(other is not request for other in self.receiving())

    def _began(self, operation: str, peer: int, tag: int, caller: str = '') -> MessageRecord:
        call = self.record.add_message(operation, peer, tag)
        if caller:
            call.words = f'of {caller}'
        return self.record

    def _ssend(self, message: bytes, dest: int, tag: int) -> None:
        if self._receives:
            self._wait(self._mpi_comm.Issend(message, dest, tag))
        else:
            self._mpi_comm.Ssend(message, dest, tag)

    def _wait(self, request: MPI.Request, status: MPI.Status | None = None) -> None:
        """Block for a request while making progress with the requests of irecv.

        Otherwise two ranks could each wait for the other to receive a large array.
        """
        try:
            while self.receiving():
                if request.Test(status):
                    return
                os.sched_yield()
        except MPI.Exception:
            raise
        except BaseException:  # raised by a signal handler, as in wait
            request.Wait(status)
            raise
        wait(request, status, self._spins)

    def _send_rest(self, messages: Iterable[Array | bytes], dest: int, number: int) -> None:
        """Send the payload of a message."""
        for message in messages:
            if self._receives:
                self._wait(self._payloads.mpi_comm.Isend(message, dest, number))
            else:
                self._payloads.mpi_comm.Send(message, dest, number)

    def _check(self, peer: int, tag: int, name: str, wildcards: bool) -> None:
        """Check peer and tag. Raise on this rank only, because there is no rank to notify."""
        if not is_integer(peer) or not is_integer(tag):
            advice = '' if not hasattr(peer, 'dtype') else (
                '. Check the order of the arguments: send(data, dest, tag)' if name == 'dest' else
                '; the received array is returned: x = comm.recv(source, tag)')
            raise TypeError(f'{name} and tag must be integers, not {_described(peer)} and '
                            f'{_described(tag)}{advice}')
        if not (0 <= peer < self._size or (wildcards and peer == MPI.ANY_SOURCE)):
            raise ValueError(f'{name} must be a rank from 0 to {self._size - 1}, not {peer}')
        if not (0 <= tag <= self._max_tag or (wildcards and tag == MPI.ANY_TAG)):
            raise ValueError(f'tag must be from 0 to {self._max_tag}, not {tag}')

    def _check_other(self, peer: int, tag: int, name: str, wildcards: bool) -> None:
        """Check peer and tag as in :meth:`_check`, and also reject this rank as peer."""
        if type(peer) is int and peer != self.rank and type(tag) is int and (
                0 <= peer < self._size and 0 <= tag <= self._max_tag):
            return
        self._check(peer, tag, name, wildcards)
        if peer == self.rank:
            raise ValueError(f'{name} must be another rank, not this rank itself ({peer}): the '
                             'call would block forever')
        if self._size == 1:
            raise ValueError('the communicator has only one rank: there is no rank to send to or '
                             'to receive from')

    def _fail_send(self, operation: str, error: Exception, dest: int, tag: int) -> NoReturn:
        failure = RemoteError.of(operation, error)._replace(text=str(error)[:INLINE // 8])
        message = message_header.ERROR + pickle.dumps(failure)
        self.record.count_sent(dest, tag)
        if dest == self.rank:  # a blocking send would wait for this rank to receive
            self.pending.record(f'{operation} to rank {dest} with tag {tag}, which failed',
                               [self._mpi_comm.Isend(message, dest, tag)])
        else:
            self._mpi_comm.Send(message, dest, tag)
        raise self._error(failure, self.rank, dest, tag) from error

    def _error(self, failure: RemoteError, source: int, dest: int, tag: int) -> Exception:
        return failure.error(f'{failure.operation} from rank {source} to rank {dest} with tag '
                             f'{tag} failed (no data was sent)\n  rank {source}: {failure.text}')

    def _parts(self, operation: str, data: Arrays, dest: int, tag: int, copies: bool = False
               ) -> tuple[bytes, int, list[Array | bytes]]:
        """Return the first part of a message, the number of its payload, and the payload.

        Args:
            operation: The name of the operation, for errors.
            data: An array or a sequence of arrays.
            dest: The receiver, which also raises the error if the data is invalid.
            tag: The user's tag.
            copies: Whether to copy large arrays.
        """
        is_one = not isinstance(data, (tuple, list))
        try:
            arrays = [array_buffers.checked(x) for x in ([data] if is_one else data)]
            payloads = message_parts.payloads(arrays, copies)
        except Exception as error:
            self._fail_send(operation, error, dest, tag)
        if not is_one:
            number = self._payloads.new_number()
            first, rest = message_parts.of_tuple(arrays, payloads, number)
            return first, number, rest
        if message_parts.is_inline(payloads[0]):
            return message_parts.head(arrays[0]) + payloads[0].tobytes(), IN_MESSAGE, []
        number = self._payloads.new_number()
        return message_parts.head(arrays[0], number), number, [*payloads]

    def _receive(self, source: int, tag: int, expected: str, status: MPI.Status | None = None
                 ) -> Receives[Arrays]:
        """Receive the next message; raise if the sender failed or sent the wrong kind."""
        status = MPI.Status() if status is None else status
        message = yield from message_parts.receive(self._mpi_comm, source, tag, status)
        return (yield from self._finish_plain(
            message, status.Get_source(), status.Get_tag(), expected))

    def _finish_plain(self, message: FirstPart, source: int, tag: int, expected: str
                      ) -> Receives[Arrays]:
        """Receive the data of a message; raise if it is a marked gradient."""
        received = yield from self._finish(message, source, tag, expected)
        if message.mark is not None and message.mark.kind is Kind.GRADIENT:
            raise message_parts.unexpected(
                self.rank, message.mark, source,
                f'recv from rank {source} with tag {tag}, called at {call_site.locate()}')
        return received

    def _finish(self, message: FirstPart, source: int, tag: int, expected: str) -> Receives[Arrays]:
        """Receive the data of a message; raise if the sender failed or sent the wrong kind."""
        record = self.record
        record.receiving[source, tag] += 1
        try:
            return (yield from self._data(message, source, tag, expected))
        finally:
            record.received[source, tag] += 1
            record.receiving[source, tag] -= 1

    def _data(self, message: FirstPart, source: int, tag: int, expected: str) -> Receives[Arrays]:
        _, header, body = message
        received: Arrays
        if header.kind is Kind.ERROR:
            raise self._error(pickle.loads(body), source, self.rank, tag)
        if header.kind is Kind.OBJECT:
            received = load(body, (), source, self.rank) if header.payload == IN_MESSAGE else (
                yield from self._payloads.receive_object(source, header.payload))
        elif header.kind is Kind.ARRAY:
            received = yield from self._payloads.receive_array(header, body, source)
        else:
            received = yield from self._payloads.receive_tuple(header, body, source)
        is_object = header.kind is Kind.OBJECT
        if is_object != (expected == 'send_obj'):
            suffix = '_obj' * is_object
            raise TypeError(f'rank {source} sent its message with tag {tag} using send{suffix}(); '
                            f'receive it with recv{suffix}()')
        return received


def _described(argument: object) -> str:
    """Describe an argument: an array by its dtype and shape, other objects by their repr."""
    if hasattr(argument, 'dtype') and hasattr(argument, 'shape'):
        return f'an array of dtype {argument.dtype} and shape {argument.shape}'
    return repr(argument)
