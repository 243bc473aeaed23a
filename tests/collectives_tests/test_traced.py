"""With a timeline the verbs do what they do without, and each is on it once, with its waiting."""

import itertools
import json
import os
import pathlib
import time

import chainer
import numpy as np
import pytest
from mpi4py import MPI
from time_limits import seconds

import chainermn
from chainermn._collectives import traced
from chainermn._tracing import recorder
from chainermn.communicators.communicator_base import CommunicatorBase

size = MPI.COMM_WORLD.size

#: Public methods that exchange nothing between ranks, or only to raise an error.
NO_VERBS = {
    'allreduce_grad', 'at_update', 'broadcast_data', 'check_grad_dtype', 'check_requirements',
    'config_scope', 'get_config', 'refuse', 'said_in_join', 'set_config', 'span'}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that all ranks share, with the variable set."""
    shared = MPI.COMM_WORLD.bcast(str(tmp_path))
    monkeypatch.setenv(recorder.VARIABLE, f'{shared}/out.json')
    yield pathlib.Path(shared)
    recorder.close()


@pytest.fixture
def events(folder):
    """Ends the timeline; returns what happened, in the order in which it began."""
    def read():
        recorder.close()
        said = json.loads((folder / f'out.{MPI.COMM_WORLD.rank}.json').read_text())
        return sorted((event for event in said if event['ph'] == 'X'),
                      key=lambda event: (event['ts'], -event['dur']))

    return read


def names(events, category='verb'):
    return [event['name'] for event in events if event.get('cat', '') == category]


def verbs_of(events):
    return [event for event in events if event.get('cat') == 'verb']


def assert_that_they_nest(events):
    """Viewers want of two events in a row that one contains the other or they are apart."""
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


def test_every_verb_is_known():
    public = {name for name, value in vars(CommunicatorBase).items()
              if callable(value) and not name.startswith('_')} | {'check_grad_dtype',
                                                                  'check_requirements'}
    assert public == {
        *traced._ARRAYS, *traced._OBJECTS, *traced._MODELS,
        *traced._OTHERS, *traced._MESSAGES} | NO_VERBS


@pytest.mark.parametrize('name', ['naive', 'flat'])
def test_collective_verbs(name, events):
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
    said = verbs_of(events())
    assert names(said) == ['allreduce', 'allreduce', 'bcast', 'allgather', 'allreduce_many',
                           'barrier', 'allreduce_obj', 'split', 'barrier']
    assert details(said[0]) == details(said[1]) == [24, 'float32', '(2, 3)']
    assert details(said[2]) == [40, 'float64', '(5,)']
    assert details(said[3]) == [4 * comm.rank, 'int32', f'({comm.rank},)']
    assert details(said[4]) == [44, 'float32, float64', '2 arrays']
    assert details(said[5]) == [None] * 3
    of = 'rank 0' if size == 1 else f'ranks 0-{size - 1}'
    assert [event['args']['comm'] for event in said] == [of] * 8 + [f'{of}, communicator 2']
    # The number is that of the agreement, which is the same on all ranks.
    numbers = [event['args'].get('number') for event in said]
    assert len({*MPI.COMM_WORLD.allgather(str(numbers))}) == 1
    if size > 1:
        assert all(a < b for a, b in itertools.pairwise(numbers[:8])) and numbers[8] == 1


@pytest.mark.mpi(min_size=2)
def test_who_comes_early_waits(events):
    comm = chainermn.create_communicator('naive')
    comm.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(seconds(.2))  # the others have to get there
    comm.allreduce(np.ones(3, 'f'))
    said = events()
    verb, = (event for event in said if event['name'] == 'allreduce')
    wait, = (event for event in said if event['name'] == 'wait' and verb['ts'] <= event['ts'] and
             event['ts'] + event['dur'] <= verb['ts'] + verb['dur'])
    assert wait['cat'] == 'wait'
    # Clocks are compared later, so the rank that came last cannot have waited longest.
    waited = MPI.COMM_WORLD.allgather(wait['dur'])
    assert min(waited[:-1]) > waited[-1] and min(waited[:-1]) > 5e4


@pytest.mark.mpi(min_size=2)
def test_messages(events):
    comm = chainermn.create_communicator('naive')
    others = {(comm.rank + 1) % size, (comm.rank - 1) % size}
    if comm.rank == 0:
        comm.send(np.ones(3, 'f'), 1, 5)
    elif comm.rank == 1:
        assert comm.recv(0, 5).sum() == 3
    received = comm.irecv((comm.rank - 1) % size)
    sent = comm.isend(np.full(50000, comm.rank, 'f'), (comm.rank + 1) % size)
    sent.wait()
    assert received.wait()[0] == (comm.rank - 1) % size
    comm.send_obj({}, (comm.rank + 1) % size, 7)
    comm.recv_obj((comm.rank - 1) % size, tag=7)
    said = verbs_of(events())
    first = {0: ['send'], 1: ['recv']}.get(comm.rank, [])
    assert names(said) == [*first, 'irecv', 'isend', 'wait', 'wait', 'send_obj', 'recv_obj']
    if first:
        assert said[0]['args'].items() >= {'peer': 1 - comm.rank, 'tag': 5, 'bytes': 12,
                                           'dtype': 'float32', 'shape': '(3,)'}.items()
    assert {event['args']['peer'] for event in said[-6:-2:2]} <= others
    assert said[-3]['args']['bytes'] == 200000


def test_models(events):
    comm = chainermn.create_communicator('flat')
    model = chainer.links.Linear(3, 4)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
    for _ in range(2):
        optimizer.update(lambda x: chainer.functions.sum(model(x)), np.ones((2, 3), 'f'))
    comm.check_replicas(model)
    said = events()
    assert names(said, '') == ['forward', 'backward', 'broadcast', 'forward', 'backward',
                               'exchange', 'update']
    verbs = verbs_of(said)
    assert names(verbs) == ['bcast_data', 'multi_node_mean_grad', 'check_replicas']
    assert details(verbs[0]) == details(verbs[1]) == [64, 'float32', '2 arrays']
    assert_that_they_nest(said)
    exchange, = (event for event in said if event['name'] == 'exchange')
    assert exchange['ts'] <= verbs[1]['ts'] <= exchange['ts'] + exchange['dur']


@pytest.mark.mpi(min_size=2)
def test_the_thread_that_exchanges_has_a_row_of_its_own(events):
    comm = chainermn.create_communicator('flat')
    queue = comm.mean_queue()
    assert comm.mean_queue() is queue  # which is no exchange
    means = queue.put({'x': np.full(10, comm.rank, 'd')})
    queue.wait()
    assert (means[0] == (size - 1) / 2).all()
    said = events()
    row, = {event['tid'] for event in said if event['name'] == 'means'}
    assert row == 1
    assert names([event for event in said if event['tid'] == row]) == ['means']
    assert names([event for event in said if event['tid'] == row], 'wait')[0] == 'wait'
    assert details(next(e for e in said if e['name'] == 'means')) == [80, 'float64', '(10,)']
    assert names([e for e in said if e['tid'] == 0]) == ['mean_queue', 'wait for means']
    comm.finalize()


def test_a_verb_that_fails_is_there_as_well(events):
    comm = chainermn.create_communicator('naive')
    with pytest.raises(TypeError):
        comm.allreduce('no array')
    assert names(events()) == ['allreduce']


def test_reports_still_know_who_called(folder, monkeypatch):
    monkeypatch.setenv('CHAINERMN_TIMEOUT', '50')
    comm = chainermn.create_communicator('naive')
    comm.barrier()
    calls, _ = comm.recent_calls()
    assert calls.newest.site.startswith('test_traced.py:')
    assert isinstance(calls.newest_kept, bytes)


def test_the_files_say_how_the_clocks_stand(folder, events):
    chainermn.create_communicator('naive')
    events()
    said = json.loads((folder / f'out.{MPI.COMM_WORLD.rank}.json').read_text())
    clocks = [event['args'] for event in said if event['name'] == 'clock']
    assert len(clocks) == (1 if size > 1 else 0)
    groups = MPI.COMM_WORLD.allgather([clock['group'] for clock in clocks])
    assert groups == groups[:1] * size


def error_on_all_ranks(kind):
    with pytest.raises(kind) as raised:
        chainermn.create_communicator('naive')
    assert len({*MPI.COMM_WORLD.allgather(str(raised.value))}) == 1
    return str(raised.value)


@pytest.mark.mpi(min_size=2)
def test_a_variable_that_only_some_ranks_have(folder, monkeypatch):
    if MPI.COMM_WORLD.rank == 0:
        monkeypatch.delenv(recorder.VARIABLE)
    ranks = 'rank 1' if size == 2 else f'ranks 1-{size - 1}'
    assert error_on_all_ranks(ValueError) == (
        f'CHAINERMN_TIMELINE has to be set on all ranks or on none, but is set only on {ranks}')


@pytest.mark.parametrize('name, why', [
    ('/missing/out.json', os.strerror(2)), ('/', 'empty name')])
def test_a_file_that_one_rank_cannot_write(name, why, folder, monkeypatch):
    if MPI.COMM_WORLD.rank == size - 1:
        monkeypatch.setenv(recorder.VARIABLE, name)
    text = error_on_all_ranks(OSError)
    assert text.startswith(f'CHAINERMN_TIMELINE: rank {size - 1} cannot write its timeline: ')
    assert why in text
