"""Records the operations of a communicator on the timeline, with the time spent waiting.

Only where there is a timeline: then each operation of the communicator is replaced, on the
instance, by one that takes the time; the others pay nothing.  What an operation waits for is the
agreement with which it begins, since the last rank that comes ends that for all.
"""
from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from chainermn import _signature
from chainermn._diagnostics import shutdown
from chainermn._diagnostics.flight_recorder import Calls
from chainermn._ranks import ranks_text
from chainermn._tracing import clock_sync, recorder
from chainermn._tracing.recorder import Timeline, now

_ARRAYS = (
    'bcast', 'gather', 'allgather', 'allreduce', 'allreduce_many', 'reduce', 'reduce_scatter',
    'alltoall', 'scatter', 'multi_node_mean')
_OBJECTS = 'bcast_obj', 'gather_obj', 'allgather_obj', 'scatter_obj', 'allreduce_obj'
_MODELS = 'bcast_data', 'multi_node_mean_grad', 'multi_node_mean_grad_async'
_OTHERS = (
    'barrier', 'check_replicas', 'split', 'new_group', 'serve', 'agree_to_join', 'mean_queue',
    'finalize')
_MESSAGES = (
    'send', 'recv', 'isend', 'irecv', 'send_obj', 'recv_obj', 'waitall',
    'send_activation', 'recv_activation', 'send_gradient', 'recv_gradient')

#: Operations whose result has something to wait for.
_GIVE_MORE = {'isend', 'irecv', 'serve', 'mean_queue'}

#: Those whose parameters are what travels.
_PAYLOADS = 'x', 'xs', 'data'


def begin(comm: Any) -> None:
    """Puts a communicator on the timeline of each rank.  Collective: every rank calls it.

    Args:
        comm: The communicator, as it has just been made.

    Raises:
        OSError: On all ranks, if one cannot write its file.
    """
    mpi_comm, failure = comm._arrays, ''
    try:
        recorder.open_file(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    except (OSError, ValueError) as error:
        failure = str(error)
    for rank, text in enumerate(mpi_comm.allgather(failure)):
        if text:
            raise OSError(f'{recorder.VARIABLE}: rank {rank} cannot write its timeline: {text}')
    timeline = recorder.get()
    assert timeline is not None
    ranks = comm.recent_calls()[0].ranks
    name = ranks_text(sorted(ranks))
    if not timeline.communicators:
        shutdown.before_the_end(_at_the_end)
    if len(ranks) > 1 and not any(set(ranks) <= set(group) for group in timeline.compared):
        timeline.compared[ranks] = compare = _comparison(timeline, mpi_comm.Dup(), name)
        compare()
    timeline.communicators[name] += 1
    number = timeline.communicators[name]
    _Recorder(timeline, comm, name if number == 1 else f'{name}, communicator {number}'
              ).replace_verbs()
    comm._agreement.mpi_comm = _Waiting(comm._agreement.mpi_comm)


def _at_the_end() -> None:
    timeline = recorder.get()
    if timeline is not None:
        for compare in timeline.compared.values():  # again, since clocks drift
            compare()
        recorder.close()


def _comparison(timeline: Timeline, mpi_comm: Any, name: str) -> Callable[[], None]:
    """What compares the clocks of ranks, and puts the result on the timeline."""
    group = mpi_comm.bcast(f'{time.time():.6f} {name}')

    def compare() -> None:
        offset = clock_sync.compare(mpi_comm, lambda: now() - timeline.origin)
        timeline.say_clock({'group': group, 'offset_us': offset.offset / 1000,
                            'error_us': offset.error / 1000})

    return compare


class _Waiting(MPI.Intracomm):
    """The communicator of an agreement: who exchanges headers waits for the last rank."""

    def Allgather(self, *args: Any) -> None:  # noqa: N802  (it is MPI's)
        begin = now()
        super().Allgather(*args)
        timeline = recorder.get()
        if timeline is not None:
            timeline.add('wait', 'wait', begin, now())


class _Recorder:
    """Takes the times of the operations of one communicator, of each call the outermost one."""

    def __init__(self, timeline: Timeline, comm: Any, name: str) -> None:
        self._timeline = timeline
        self._comm = comm
        self._name = name
        self._is_inside = False
        self._arrays = ''  # of the model, described

    def replace_verbs(self) -> None:
        collective, messages = self._comm.recent_calls()
        self._replace('_agreed_parameters', self._noting(self._comm._agreed_parameters))
        for verb in (*_ARRAYS, *_OBJECTS, *_MODELS, *_OTHERS):
            self._replace(verb, self._timed(verb, getattr(self._comm, verb), collective))
        for verb in _MESSAGES:
            self._replace(verb, self._timed(verb, getattr(self._comm, verb), messages))

    def _replace(self, name: str, function: Any) -> None:
        object.__setattr__(self._comm, name, function)

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Notes which arrays of a model are exchanged."""
        def noting(*args: Any) -> Any:
            arrays = method(*args)
            self._arrays = recorder.described(arrays.values())
            return arrays

        return noting

    def _timed(self, verb: str, method: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
        timeline = self._timeline
        comm = f'"comm":{recorder.quoted(self._name)}'
        describe = self._describer(verb, calls)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return method(*args, **kwargs)
            self._is_inside = True
            number = calls.count + 1
            begin = now()
            try:
                result = method(*args, **kwargs)
            except BaseException:
                timeline.add(verb, 'verb', begin, now(), comm)
                timeline.write()  # it may be the last thing that this rank does
                raise
            finally:
                self._is_inside = False
            end = now()
            if verb in _GIVE_MORE:
                self._time_more(verb, result, calls)
            # Without it, nothing was exchanged: such as for a queue that is there already.
            is_exchanged = calls.count >= number
            if is_exchanged or verb != 'mean_queue':
                details = describe(args, kwargs, result)
                timeline.add(verb, 'verb', begin, end, comm + (
                    f',"number":{number}' if is_exchanged else '') + (
                    f',{details}' if details else ''))
            return result

        return timed

    def _time_more(self, verb: str, result: Any, calls: Calls) -> None:
        """Times what is called of an operation's result."""
        if verb == 'serve':
            asks = _Recorder(self._timeline, self._comm, f'service of {self._name}')
            result.ask = asks._timed('ask', result.ask, result.recent_calls()[0])
        elif verb != 'mean_queue':
            result.wait = self._timed('wait', result.wait, calls)
        elif 'wait' not in vars(result):  # it is always the same queue
            result.wait = _spanned('wait for means', result.wait)

    def _describer(self, verb: str, calls: Calls) -> Callable[[Any, Any, Any], str]:
        """What says, of arguments and result, what travelled."""
        if verb in _MODELS:
            return lambda args, kwargs, result: self._arrays
        if verb in _OBJECTS:  # of which the header of a small one says how long it is
            def of_object(args: Any, kwargs: Any, result: Any) -> str:
                header = calls.newest_kept
                number = _signature.unpack(header).number if isinstance(header, bytes) else 0
                return f'"bytes":{number}' if number else ''

            return of_object
        if verb in _ARRAYS or verb == 'ask':
            return _of_call
        if verb == 'waitall' or verb in _OTHERS:
            return lambda args, kwargs, result: ''

        def of_message(args: Any, kwargs: Any, result: Any) -> str:
            message = calls.newest_kept
            parts = [f'"peer":{message[1]},"tag":{message[2]}'
                     ] if isinstance(message, tuple) else []
            if verb == 'recv_activation':
                result = result[0]
            if text := _of_call(args, kwargs, result):
                parts.append(text)
            return ','.join(parts)

        return of_message


def _spanned(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def spanned(*args: Any) -> Any:
        with recorder.span(name, 'verb'):
            return function(*args)

    return spanned


def _of_call(args: Any, kwargs: Any, result: Any) -> str:
    """Describes the arrays that were given, or else those that were got."""
    given = args[0] if args else next(
        (kwargs[name] for name in _PAYLOADS if name in kwargs), None)
    return _of_arrays(given) or _of_arrays(
        [*result.values()] if isinstance(result, dict) else result)


def _of_arrays(x: Any) -> str:
    xs = x if isinstance(x, (tuple, list)) else [x]
    for each in xs:
        if not (hasattr(each, 'nbytes') and hasattr(each, 'dtype')):
            return ''
    return recorder.described(xs) if xs else ''
