"""The flight recorder: the last calls of each communicator, in order, with their arguments."""

import inspect
import threading

import chainer
import numpy as np
from mpi4py import MPI

import chainermn
from chainermn._diagnostics import flight_recorder
from chainermn._diagnostics.flight_recorder import LENGTH, FlightRecord


def test_only_the_last_ones_are_recorded():
    calls = FlightRecord(MPI.COMM_WORLD)
    assert calls.newest is None
    for n in range(2 * LENGTH):
        calls.add(operation='operation').words = f'with {n}'
    assert [call.number for call in calls.ring] == [*range(LENGTH + 1, 2 * LENGTH + 1)]
    assert calls.newest.text == f'operation #{2 * LENGTH} with {2 * LENGTH - 1}'


def test_summary_joins_equal_calls():
    calls = FlightRecord(MPI.COMM_WORLD)
    for what in ['a', 'a', 'a', 'b 1', 'b 2', 'recv', 'a']:
        operation, _, words = what.partition(' ')
        call = calls.add(operation=operation)
        call.words = words
        if operation == 'recv':
            call.peer, call.tag = -2, -1
    assert flight_recorder.summary(calls.ring) == (
        'a #1-3; b #4 1; b #5 2; recv #6 from any rank any tag; a #7')


def test_ranks_are_those_of_the_world():
    reverse = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)
    assert FlightRecord(reverse).ranks == tuple(range(MPI.COMM_WORLD.size))[::-1]
    reverse.Free()


def test_call_sites_are_recorded_on_request(monkeypatch):
    for name, value in ('CHAINERMN_TIMEOUT', '100'), ('CHAINERMN_DEBUG', '1'):
        monkeypatch.setenv(name, value)
        comm = chainermn.create_communicator('naive')
        model = chainer.Link(w=None)
        me = comm.rank
        site = f'test_flight_recorder.py:{inspect.currentframe().f_lineno + 1}'
        called = comm.barrier(), comm.bcast_data(model), comm.send_obj(1, me), comm.recv_obj(me)
        assert called == (None, None, None, 1)
        collective, messages = comm._flight_records()
        calls = [*list(collective.ring)[-2:], *messages.ring]
        assert {call.site for call in calls} == {site}
        assert flight_recorder.summary(collective.ring).endswith(f', called at {site}')
        comm.finalize()
        monkeypatch.delenv(name)


def test_call_sites_are_lines_of_the_program(monkeypatch):
    """Not of ChainerMN or Chainer, which call operations for it."""
    monkeypatch.setenv('CHAINERMN_TIMEOUT', '100')
    comm = chainermn.create_communicator('naive')
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(
        chainer.links.Classifier(chainer.links.Linear(3, 2)))
    data = [(np.ones(3, 'f'), np.int32(0))] * 4
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(data, 2), optimizer)
    trainer = chainer.training.Trainer(updater, (3, 'iteration'))
    evaluator = chainermn.create_multi_node_evaluator(chainer.training.extensions.Evaluator(
        chainer.iterators.SerialIterator(data, 2, repeat=False), optimizer.target), comm)
    trainer.extend(evaluator, trigger=(1, 'iteration'))
    line = inspect.currentframe().f_lineno + 1
    trainer.run()
    called = {call.operation: call.site for call in comm._flight_records()[0].ring}
    assert {'multi_node_mean_grad', 'bcast_data'} <= {*called}
    assert {*called.values()} == {f'test_flight_recorder.py:{line}'}
    comm.finalize()


def test_calls_without_a_program_have_no_call_site(monkeypatch):
    monkeypatch.setenv('CHAINERMN_TIMEOUT', '100')
    comm = chainermn.create_communicator('naive')
    thread = threading.Thread(target=comm.barrier)
    thread.start()
    thread.join()
    assert comm._flight_records()[0].newest.site == ''
    comm.finalize()


def test_the_calls_of_a_communicator_go_with_it():
    def all_ids():
        return {id(calls) for calls in flight_recorder.all_records()}

    comm = chainermn.create_communicator('naive')
    collective, messages = comm._flight_records()
    assert {id(collective), id(messages)} <= all_ids()
    comm.finalize()
    gone = id(collective), id(messages)
    del collective, messages
    assert not all_ids() & set(gone)

