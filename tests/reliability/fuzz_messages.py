"""Plays point-to-point messages between two ranks."""
from __future__ import annotations

from typing import Any

from fuzz_calls import Message, Messages
from fuzz_compare import Outcomes, is_right, short
from fuzz_values import Arrays, Object
from mpi4py import MPI


def send_and_receive(comm: Any, step: Messages) -> Outcomes:
    outcomes: Outcomes = {}
    if not step.by_requests:
        for i, message in enumerate(step.messages):
            _send(comm, i, message, outcomes, '')
            _receive(comm, i, message, outcomes)
        return outcomes
    receives = [(i, message, comm.irecv(message.source, message.tag))
                for i, message in enumerate(step.messages)
                if message.dest == comm.rank and not _own_errors(message, True)]
    sends = [request for i, message in enumerate(step.messages)
             if (request := _send(comm, i, message, outcomes, 'i')) is not None]
    if any(_payload_errors(message.payload) for _, message, _ in receives):
        for i, message, request in receives:
            _note(outcomes, i, message, 'received', request.wait)
        comm.waitall(sends)
    else:
        results = comm.waitall([*sends, *(request for *_, request in receives)])
        for (i, message, _), result in zip(receives, results[len(sends):], strict=True):
            _note(outcomes, i, message, 'received', lambda result=result: result)
    return outcomes


def _own_errors(message: Message, to_itself: bool) -> tuple[type[Exception], ...]:
    """Errors on the sender only, without a message."""
    source, dest, tag = message[:3]
    is_int = [isinstance(x, int) and not isinstance(x, bool) for x in (dest, tag)]
    if not all(is_int):
        return (TypeError,)
    if not (0 <= dest < MPI.COMM_WORLD.size and 0 <= tag < 2 ** 24) or (
            source == dest and not to_itself):
        return (ValueError,)
    return ()


def _payload_errors(payload: Any) -> tuple[type[Exception], ...]:
    if isinstance(payload, Object):
        return (TypeError,) if payload.is_bad else ()
    items = payload.items if isinstance(payload, Arrays) else (payload,)
    return (TypeError,) if any(item.is_bad for item in items) else ()


def _send(comm: Any, i: int, message: Message, outcomes: Outcomes, way: str) -> Any:
    """Send if this rank is the sender; return a request for ``isend``."""
    if comm.rank != message.source:
        return None
    is_object = isinstance(message.payload, Object)
    operation = comm.send_obj if is_object else comm.isend if way else comm.send
    requests = []

    def send() -> None:
        requests.append(operation(message.payload.make(), message.dest, message.tag))

    errors = _own_errors(message, bool(way) or is_object)
    _note(outcomes, i, message, 'sent', send, errors or _payload_errors(message.payload), None)
    return requests[0] if requests and way else None


def _receive(comm: Any, i: int, message: Message, outcomes: Outcomes) -> None:
    is_object = isinstance(message.payload, Object)
    to_itself = message.source == message.dest
    if comm.rank != message.dest or _own_errors(message, is_object):
        return
    wants_object = is_object if to_itself else message.received == 'object'

    def receive() -> Any:
        if wants_object:
            return comm.recv_obj(message.source, tag=message.tag)
        return comm.recv(message.source, message.tag)

    mismatch = (TypeError,) if wants_object != is_object else ()
    _note(outcomes, i, message, 'received', receive,
          _payload_errors(message.payload) or mismatch)


def _note(outcomes: Outcomes, i: int, message: Message, what: str, act: Any,
          errors: Any = None, value: Any = ...) -> None:
    """Call ``act`` and record the outcome; errors under a key that both ends share."""
    if errors is None:
        errors = _payload_errors(message.payload)
    is_shared = bool(_payload_errors(message.payload)) and not _own_errors(message, True)
    key = ('message', i) if is_shared else (what, i)
    try:
        result = act()
    except Exception as error:
        wrong = '' if isinstance(error, errors) else f'{message} {what}: raised {error!r}'
        outcomes[key] = wrong, (type(error).__name__, str(error))
        return
    if value is ...:
        payload = message.payload
        value = payload if errors else (
            payload.make() if isinstance(payload, Object) else
            tuple(payload.values()) if isinstance(payload, Arrays) else payload.value())
    right = not errors and (value is None or is_right(result, value, None))
    outcomes[key] = '' if right else f'{message} {what}: gave {short(result)}', None
