"""Tracing changes no result, and records each operation once, with its waiting time."""

import itertools
import json
import os
import pathlib
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI
from time_limits import seconds

import chainermn
from chainermn._collectives import operation
from chainermn._operations import call
from chainermn._timeline import recorder
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase

size = MPI.COMM_WORLD.size

#: Public methods without exchanges, or with exchanges only to raise an error.
NOT_TRACED = {
    'allreduce_grad', 'broadcast_data', 'called_by', 'config_scope', 'get_config',
    'set_config', 'span',
    'finalize'}  # which calls an operation, unless it was called before


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that all ranks share, with the variable set."""
    shared = MPI.COMM_WORLD.bcast(str(tmp_path))
    monkeypatch.setenv(recorder.VARIABLE, f'{shared}/out.json')
    yield pathlib.Path(shared)
    recorder.close()


@pytest.fixture
def events(folder):
    """End the timeline; return its events by start time."""
    def read():
        recorder.close()
        recorded = json.loads((folder / f'out.{MPI.COMM_WORLD.rank}.json').read_text())
        return sorted((event for event in recorded if event['ph'] == 'X'),
                      key=lambda event: (event['ts'], -event['dur']))

    return read


def names(events, category='operation'):
    return [event['name'] for event in events if event.get('cat', '') == category]


def operations_of(events):
    return [event for event in events if event.get('cat') == 'operation']


def assert_that_they_nest(events):
    """Viewers require that two events of a row are nested or disjoint."""
    open_until = {}
    for event in events:
        begin = round(event['ts'] * 1000)
        end = begin + round(event['dur'] * 1000)
        ends = open_until.setdefault(event['tid'], [])
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1], event
        ends.append(end)


def details(event):
    return [event.get('args', {}).get(key) for key in ('bytes', 'dtype', 'shape')]


def test_every_operation_is_traced():
    """Each operation has the wrapper that creates calls and notifies instruments."""
    wrapper = operation.operation(MpiCommunicatorBase.barrier).__code__
    untraced = {
        name for name, value in vars(CommunicatorBase).items()
        if callable(value) and not name.startswith('_')
        and getattr(getattr(MpiCommunicatorBase, name), '__code__', None) is not wrapper}
    assert untraced == NOT_TRACED


@pytest.mark.parametrize('name', ['naive', 'flat'])
def test_collective_operations(name, events):
    comm = chainermn.create_communicator(name)
    x = np.full((2, 3), comm.rank + 1, 'f')
    total = sum(range(1, size + 1))
    assert (comm.allreduce(x) == total).all()
    assert (comm.allreduce(x, op='max', out=x) is x) and (x == size).all()
    assert comm.bcast(np.arange(5.) if comm.rank == 0 else None)[4] == 4
    assert len(comm.allgather(np.ones(comm.rank, 'i'))) == size
    comm.allreduce_many([np.ones(3, 'f'), np.ones((2, 2), 'd')])
    comm.barrier()
    assert comm.allreduce_obj(1) == size
    part = comm.split(0, comm.rank)
    part.barrier()
    recorded = operations_of(events())
    assert names(recorded) == ['allreduce', 'allreduce', 'bcast', 'allgather', 'allreduce_many',
                           'barrier', 'allreduce_obj', 'split', 'barrier']
    assert details(recorded[0]) == details(recorded[1]) == [24, 'float32', '(2, 3)']
    assert details(recorded[2]) == [40, 'float64', '(5,)']
    assert details(recorded[3]) == [4 * comm.rank, 'int32', f'({comm.rank},)']
    assert details(recorded[4]) == [44, 'float32, float64', '2 arrays']
    assert details(recorded[5]) == [None] * 3
    of = 'rank 0' if size == 1 else f'ranks 0-{size - 1}'
    assert [event['args']['comm'] for event in recorded] == [of] * 8 + [f'{of}, communicator 2']
    # The number of the consistency check, equal on all ranks.
    numbers = [event['args'].get('number') for event in recorded]
    assert len({*MPI.COMM_WORLD.allgather(str(numbers))}) == 1
    if size > 1:
        assert all(a < b for a, b in itertools.pairwise(numbers[:8])) and numbers[8] == 1


@pytest.mark.mpi(min_size=2)
def test_early_ranks_wait(events):
    comm = chainermn.create_communicator('naive')
    comm.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(seconds(.2))  # the others have to get there
    comm.allreduce(np.ones(3, 'f'))
    recorded = events()
    reduction, = (event for event in recorded if event['name'] == 'allreduce')
    wait, = (event for event in recorded if event['name'] == 'wait' and
             reduction['ts'] <= event['ts'] and
             event['ts'] + event['dur'] <= reduction['ts'] + reduction['dur'])
    assert wait['cat'] == 'wait'
    # Clocks are compared later, so the rank that came last cannot have waited longest.
    waited = MPI.COMM_WORLD.allgather(wait['dur'])
    assert min(waited[:-1]) > waited[-1] and min(waited[:-1]) > 5e4


@pytest.mark.mpi(min_size=2)
def test_messages_of_several_threads(events):
    comm = chainermn.create_communicator('naive')
    if comm.rank > 1:
        return
    first = threading.Barrier(2)

    def exchange(tag):
        first.wait()
        for n in range(50):
            if comm.rank == 0:
                comm.send(np.full(5000, n, 'f'), 1, tag)
                comm.recv_obj(1, tag=tag)
            else:
                comm.recv(0, tag)
                time.sleep(1e-3)  # the other thread begins while rank 0 waits here
                comm.send_obj(n, 0, tag)

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorded = operations_of(events())
    assert_that_they_nest(recorded)
    for tag in (3, 5):
        assert names(event for event in recorded if event['args']['tag'] == tag) == 50 * (
            ['send', 'recv_obj'] if comm.rank == 0 else ['recv', 'send_obj'])


@pytest.mark.mpi(min_size=2)
def test_background_thread_has_its_own_row(events):
    comm = chainermn.create_communicator('flat')
    queue = comm.mean_queue()
    assert comm.mean_queue() is queue  # which is no exchange
    means = queue.submit({'x': np.full(10, comm.rank, 'd')})
    queue.wait()
    assert (means[0] == (size - 1) / 2).all()
    recorded = events()
    row, = {event['tid'] for event in recorded if event['name'] == 'means'}
    assert row == 1
    assert names([event for event in recorded if event['tid'] == row]) == ['means']
    assert names([event for event in recorded if event['tid'] == row], 'wait')[0] == 'wait'
    assert details(next(e for e in recorded if e['name'] == 'means')) == [80, 'float64', '(10,)']
    assert names([e for e in recorded if e['tid'] == 0]) == ['mean_queue', 'wait for means']
    comm.finalize()


def test_failed_operation_is_recorded(events):
    comm = chainermn.create_communicator('naive')
    with pytest.raises(TypeError):
        comm.allreduce('no array')
    assert names(events()) == ['allreduce']


def test_reports_contain_call_sites(folder, monkeypatch):
    monkeypatch.setenv('CHAINERMN_TIMEOUT', '50')
    comm = chainermn.create_communicator('naive')
    comm.barrier()
    calls, _ = comm._flight_records()
    assert calls.newest.site.startswith('test_tracer.py:')
    assert isinstance(calls.newest.signature, bytes)


def test_files_contain_clock_offsets(folder, events):
    chainermn.create_communicator('naive')
    events()
    recorded = json.loads((folder / f'out.{MPI.COMM_WORLD.rank}.json').read_text())
    clocks = [event['args'] for event in recorded if event['name'] == 'clock']
    assert len(clocks) == (1 if size > 1 else 0)
    groups = MPI.COMM_WORLD.allgather([clock['group'] for clock in clocks])
    assert groups == groups[:1] * size


def error_on_all_ranks(kind):
    with pytest.raises(kind) as raised:
        chainermn.create_communicator('naive')
    assert len({*MPI.COMM_WORLD.allgather(str(raised.value))}) == 1
    return str(raised.value)


@pytest.mark.mpi(min_size=2)
def test_variable_set_on_some_ranks_only(folder, monkeypatch):
    if MPI.COMM_WORLD.rank == 0:
        monkeypatch.delenv(recorder.VARIABLE)
    ranks = 'rank 1' if size == 2 else f'ranks 1-{size - 1}'
    assert error_on_all_ranks(ValueError) == (
        f'CHAINERMN_TIMELINE is set only on {ranks}; set it on all ranks or on none')


@pytest.mark.parametrize('name, why', [
    ('/missing/out.json', os.strerror(2)), ('/', 'empty name')])
def test_unwritable_file_on_one_rank(name, why, folder, monkeypatch):
    if MPI.COMM_WORLD.rank == size - 1:
        monkeypatch.setenv(recorder.VARIABLE, name)
    text = error_on_all_ranks(OSError)
    assert text.startswith(f'CHAINERMN_TIMELINE: rank {size - 1} cannot write its timeline: ')
    assert why in text


def test_nothing_is_told_of_calls_once_the_timeline_is_closed(events):
    comm = chainermn.create_communicator('naive')
    assert call.local.thread.instruments
    events()
    assert not call.local.thread.instruments
    comm.barrier()

