"""Records the operations of a communicator on the timeline, with the time spent waiting.

A communicator has a tracer only if a timeline is recorded. The time spent waiting is the duration
of the consistency check, which ends when the last rank enters.
"""
from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chainermn._diagnostics import lifecycle
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._operations import call_signature
from chainermn._operations.call import Call, subscribe, unsubscribe
from chainermn._operations.ranks import ranks_text
from chainermn._operations.table import BY_NAME, RECV, Payload, Waits
from chainermn._process.mpi import MPI
from chainermn._timeline import clock_sync, recorder
from chainermn._timeline.recorder import Timeline, now
from chainermn._types import Array

#: The names of parameters that take the data to send.
_PAYLOADS = 'x', 'xs', 'data'


def check_all_on(are_on: Sequence[bool]) -> None:
    """Raise ValueError, on all ranks, if only some of the ranks record a timeline."""
    ranks = [rank for rank, is_on in enumerate(are_on) if is_on]
    if 0 < len(ranks) < len(are_on):
        raise ValueError(f'{recorder.VARIABLE} is set only on {ranks_text(ranks)}; set it on all '
                         'ranks or on none')


def begin(mpi_comm: MPI.Intracomm, record: FlightRecord) -> Tracer:
    """Add a communicator to the timeline of each rank. Collective: every rank calls it.

    Args:
        mpi_comm: The MPI communicator.
        record: The flight record of the collectives.

    Raises:
        OSError: On all ranks, if one of them cannot write its file.
    """
    failure = ''
    try:
        recorder.open_file(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    except (OSError, ValueError) as error:
        failure = str(error)
    for rank, text in enumerate(mpi_comm.allgather(failure)):
        if text:
            raise OSError(f'{recorder.VARIABLE}: rank {rank} cannot write its timeline: {text}')
    timeline = recorder.get()
    assert timeline is not None
    subscribe(_by_owner)
    timeline.on_close = functools.partial(unsubscribe, _by_owner)
    ranks = record.ranks
    name = ranks_text(sorted(ranks))
    if not timeline.communicators:
        lifecycle.add_callback(_at_the_end)
    if len(ranks) > 1 and not any(set(ranks) <= set(group) for group in timeline.compared):
        timeline.compared[ranks] = compare = _comparison(timeline, mpi_comm.Dup(), name)
        compare()
    timeline.communicators[name] += 1
    number = timeline.communicators[name]
    return Tracer(timeline, name if number == 1 else f'{name}, communicator {number}')


def _at_the_end() -> None:
    timeline = recorder.get()
    if timeline is not None:
        for compare in timeline.compared.values():  # again, because clocks drift
            compare()
        recorder.close()


def _comparison(timeline: Timeline, mpi_comm: Any, name: str) -> Callable[[], None]:
    """Return a function that compares clocks and records the result on the timeline."""
    group = mpi_comm.bcast(f'{time.time():.6f} {name}')

    def compare() -> None:
        offset = clock_sync.measure(mpi_comm, lambda: now() - timeline.origin)
        timeline.add_clock({'group': group, 'offset_us': offset.offset / 1000,
                            'error_us': offset.error / 1000})

    return compare


class _Current(threading.local):
    """The current operation, for each thread: other threads may send messages at the same time."""

    call: Call | None = None  # the call that is being recorded
    begun = 0
    arrays = ''  # description of the arrays of the model


class Tracer:
    """Records the operations of one communicator, except those called by another operation."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name
        self._current = _Current()

    def of_service(self) -> Tracer:
        """Return a tracer for the requests of a service."""
        return Tracer(self._timeline, f'service of {self._name}')

    def note_model(self, arrays: Sequence[Array]) -> None:
        """Note the arrays of the model that are communicated."""
        self._current.arrays = recorder.describe(arrays)

    def begin(self, call: Call) -> None:
        """Note when a call begins, unless it is nested."""
        current = self._current
        if current.call is None:
            current.call, current.begun = call, now()

    def end(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], result: object,
            error: BaseException | None) -> None:
        """Add a call to the timeline."""
        current = self._current
        if call is not current.call:
            return
        end, current.call = now(), None
        details = [f'"comm":{recorder.quoted(self._name)}']
        if error is None:
            if not call.number and call.operation == 'mean_queue':
                return  # the queue exists already
            details += [f'"number":{call.number}'] * bool(call.number)
            details += filter(None, [self._details(call, args[1:], kwargs, result)])
        self._timeline.add(call.operation, 'operation', current.begun, end, ','.join(details))
        if error is not None:
            self._timeline.write()  # the script may end here

    def _details(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], result: object
                 ) -> str:
        """Describe the communicated data, using the arguments and the result."""
        declared = BY_NAME[call.operation]
        if declared.payload is Payload.NOTHING:
            return ''
        if declared.payload is Payload.MODEL:
            return self._current.arrays
        if declared.payload is Payload.OBJECT and declared.waits_for is Waits.RANKS:
            # The signature of a small object contains its length.
            number = call_signature.unpack(call.signature).number if call.signature else 0
            return f'"bytes":{number}' if number else ''
        parts = [] if call.peer is None else [f'"peer":{call.peer},"tag":{call.tag}']
        if call.operation == RECV and isinstance(result, tuple):
            result = result[0]
        if text := _payload_of(args, kwargs, result):
            parts.append(text)
        return ','.join(parts)


class _ByOwner:
    """Passes each call to the tracer of its communicator."""

    def begin(self, call: Call) -> None:
        if call.operation in BY_NAME and (tracer := getattr(call.owner, '_tracer', None)):
            tracer.begin(call)

    def end(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], result: object,
            error: BaseException | None) -> None:
        if tracer := getattr(call.owner, '_tracer', None):
            tracer.end(call, args, kwargs, result, error)


_by_owner = _ByOwner()


def _payload_of(args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> str:
    """Describe the arrays that were passed or, if there are none, the results."""
    given = args[0] if args else next(
        (kwargs[name] for name in _PAYLOADS if name in kwargs), None)
    return _of_arrays(given) or _of_arrays(
        [*result.values()] if isinstance(result, dict) else result)


def _of_arrays(x: object) -> str:
    xs = x if isinstance(x, (tuple, list)) else [x]
    for each in xs:
        if not (hasattr(each, 'nbytes') and hasattr(each, 'dtype')):
            return ''
    return recorder.describe(xs) if xs else ''
