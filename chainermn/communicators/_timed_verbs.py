"""Puts the verbs of a communicator on the timeline, and in each how long it waited for others.

Only where there is a timeline: then each verb of the communicator is replaced, on the instance, by
one that takes the time; the others pay nothing.  What a verb waits for is the agreement with which
it begins, since the last rank that comes ends that for all.
"""
from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from chainermn.communicators import _clocks, _end, _header, _recent, _timeline
from chainermn.communicators._disagreement import ranks_text
from chainermn.communicators._timeline import Timeline

_COLLECTIVE = (
    'bcast', 'gather', 'allgather', 'allreduce', 'allreduce_many', 'reduce', 'reduce_scatter',
    'alltoall', 'scatter', 'multi_node_mean', 'bcast_obj', 'gather_obj', 'allgather_obj',
    'scatter_obj', 'allreduce_obj', 'bcast_data', 'multi_node_mean_grad',
    'multi_node_mean_grad_async', 'check_replicas', 'barrier', 'split', 'new_group', 'serve',
    'agree_to_join', 'mean_queue', 'finalize')
_MESSAGES = ('send', 'recv', 'isend', 'irecv', 'send_obj', 'recv_obj', 'waitall')

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
        _timeline.open_file(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    except OSError as error:
        failure = str(error)
    for rank, text in enumerate(mpi_comm.allgather(failure)):
        if text:
            raise OSError(f'{_timeline.VARIABLE}: rank {rank} cannot write its timeline: {text}')
    timeline = _timeline.get()
    assert timeline is not None
    ranks = comm.recent_calls()[0].ranks
    name = ranks_text(sorted(ranks))
    if not timeline.communicators:
        _end.before_the_end(_at_the_end)
    if len(ranks) > 1 and not any(set(ranks) <= set(group) for group in timeline.compared):
        timeline.compared[ranks] = compare = _comparison(timeline, mpi_comm.Dup(), name)
        compare()
    timeline.communicators[name] += 1
    number = timeline.communicators[name]
    _Recorder(timeline, comm, name if number == 1 else f'{name}, communicator {number}'
              ).replace_verbs()
    comm._agreement.mpi_comm = _Waiting(comm._agreement.mpi_comm)


def _at_the_end() -> None:
    timeline = _timeline.get()
    if timeline is not None:
        for compare in timeline.compared.values():  # again, since clocks drift
            compare()
        _timeline.close()


def _comparison(timeline: Timeline, mpi_comm: Any, name: str) -> Callable[[], None]:
    """What compares the clocks of ranks, and puts the result on the timeline."""
    group = mpi_comm.bcast(f'{time.time():.6f} {name}')

    def compare() -> None:
        offset = _clocks.compare(mpi_comm, lambda: _timeline.now() - timeline.origin)
        timeline.say_clock({'group': group, 'offset_us': offset.offset / 1000,
                            'error_us': offset.error / 1000})

    return compare


class _Waiting(MPI.Intracomm):
    """The communicator of an agreement: who exchanges headers waits for the last rank."""

    def Allgather(self, *args: Any) -> None:  # noqa: N802  (it is MPI's)
        begin = _timeline.now()
        super().Allgather(*args)
        timeline = _timeline.get()
        if timeline is not None:
            timeline.add('wait', 'wait', begin, _timeline.now())


class _Recorder:
    """Takes the times of the verbs of one communicator, of each call the outermost one."""

    def __init__(self, timeline: Timeline, comm: Any, name: str) -> None:
        self._timeline = timeline
        self._comm = comm
        self._name = name
        self._is_inside = False
        self._arrays = ''  # of the model, described

    def replace_verbs(self) -> None:
        collective, messages = self._comm.recent_calls()
        self._replace('_agreed_parameters', self._noted(self._comm._agreed_parameters))
        for verb in _COLLECTIVE:
            self._replace(verb, self._timed(verb, getattr(self._comm, verb), collective))
        for verb in _MESSAGES:
            self._replace(verb, self._timed(verb, getattr(self._comm, verb), messages))

    def _replace(self, name: str, function: Any) -> None:
        object.__setattr__(self._comm, name, function)

    def _noted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Notes which arrays of a model are exchanged."""
        def noted(*args: Any) -> Any:
            arrays = method(*args)
            self._arrays = _timeline.described(arrays.values())
            return arrays

        return noted

    def _timed(self, verb: str, method: Callable[..., Any], calls: _recent.Calls
               ) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return method(*args, **kwargs)
            self._is_inside = True
            self._arrays = ''
            number = calls.count + 1
            result = None
            begin = _timeline.now()
            try:
                result = method(*args, **kwargs)
            except BaseException:
                self._timeline.write()  # it may be the last thing that this rank does
                raise
            finally:
                end = _timeline.now()
                self._is_inside = False
                details = f'"comm":{_timeline.quoted(self._name)},"number":{number}'
                if more := self._arrays or self._details(verb, args, kwargs, result, calls):
                    details += f',{more}'
                self._timeline.add(verb, 'verb', begin, end, details)
            if verb in ('isend', 'irecv'):
                result.wait = self._timed('wait', result.wait, calls)
            elif verb == 'mean_queue' and 'wait' not in vars(result):  # it is always the same one
                result.wait = _spanned('wait for means', result.wait)
            elif verb == 'serve':
                asks = _Recorder(self._timeline, self._comm, f'service of {self._name}')
                result.ask = asks._timed('ask', result.ask, result.recent_calls()[0])
            return result

        _recent.pass_over(timed)
        return timed

    def _details(self, verb: str, args: Any, kwargs: Any, result: Any, calls: _recent.Calls
                 ) -> str:
        """What travelled, and for messages between whom, as members of a JSON object."""
        if verb == 'wait' or (verb in _MESSAGES and verb != 'waitall'):
            return self._message(calls, args[0] if args else None, result)
        if verb.endswith('_obj'):  # of which the header of a small one says how long it is
            header = calls.newest_kept
            number = _header.unpack(header).number if isinstance(header, bytes) else 0
            return f'"bytes":{number}' if number else ''
        if verb == 'ask' and result is not None:
            return _of_arrays([*result.values()])
        for x in (args[0] if args else None, *map(kwargs.get, _PAYLOADS), result):
            if text := _of_arrays(x):
                return text
        return ''

    def _message(self, calls: _recent.Calls, *payloads: Any) -> str:
        message = calls.newest_kept
        parts = [f'"peer":{message[1]},"tag":{message[2]}'] if isinstance(message, tuple) else []
        return ','.join([*parts, *filter(None, map(_of_arrays, payloads))][:2])


def _spanned(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def spanned(*args: Any) -> Any:
        with _timeline.span(name, 'verb'):
            return function(*args)

    return spanned


def _of_arrays(x: Any) -> str:
    xs = x if isinstance(x, (tuple, list)) else [x]
    has_all = all(hasattr(each, 'nbytes') and hasattr(each, 'dtype') for each in xs)
    return _timeline.described(xs) if xs and has_all else ''
