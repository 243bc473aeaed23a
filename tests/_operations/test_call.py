"""Each thread has a list of the calls that it is executing."""

import gc
import os
import threading
import weakref

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn._diagnostics import flight_recorder
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._operations import call
from chainermn._operations.call import entered
from chainermn._operations.call_signature import pack
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase

ME = threading.get_ident()


def current():
    """The operations of this thread, the innermost first."""
    return [each.operation for each in call.of_thread(threading.get_ident())]


@entered('outer')
def outer(function):
    return function()


@entered('inner')
def inner(function):
    return function()


def test_operations_nest():
    assert current() == []
    assert outer(lambda: (current(), inner(current), current())) == (
        ['outer'], ['inner', 'outer'], ['outer'])
    assert outer(lambda: inner(call.outermost)) == 'outer'
    assert (current(), call.outermost()) == ([], '')


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_ends_an_operation(error):
    def fails():
        raise error

    def catches():
        with pytest.raises(error):
            inner(fails)
        return current()

    assert outer(catches) == ['outer']
    with pytest.raises(error):
        outer(lambda: inner(fails))
    assert current() == []


def test_threads_are_independent():
    begun, checked = threading.Event(), threading.Event()
    thread = threading.Thread(target=inner, args=[lambda: (begun.set(), checked.wait())])
    thread.start()
    begun.wait()
    assert [each.operation for each in call.of_thread(thread.ident)] == ['inner']
    assert current() == []
    checked.set()
    thread.join()
    assert call.of_thread(thread.ident) == []


def test_nothing_remains_of_a_thread_that_has_ended():
    before = len(call.threads())
    threads = [threading.Thread(target=outer, args=[current]) for _ in range(5)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(call.threads()) <= before


def test_a_recorded_call_keeps_no_communicator_alive():
    comm = chainermn.create_communicator('naive')
    records = comm._flight_records()
    model = chainer.links.Linear(2, 2)
    comm.bcast_data(model)
    comm.check_replicas(model)  # which calls another operation
    comm.send_obj(Reports(), comm.rank)
    comm.recv_obj(comm.rank)
    comm.isend(np.ones(1), comm.rank)
    comm.irecv(comm.rank).wait()
    for operation, *arguments in (comm.allreduce, 'text'), (comm.send_obj, 1, 'text'):
        with pytest.raises(TypeError):
            operation(*arguments)
    gc.collect()  # the errors
    assert all(each.owner is None for record in records for each in record.ring)
    reference = weakref.ref(comm)
    gc.disable()
    try:
        del comm, operation
        assert reference() is None
    finally:
        gc.enable()


def test_the_second_exchange_of_an_operation_is_another_call():
    calls = FlightRecord(MPI.COMM_WORLD)

    @entered('split', begin=lambda call: (setattr(calls, 'inside', call), calls)[1])
    def operation():
        for name in ('split', 'barrier'):
            calls.add(pack(name))
        return calls.inside

    first = operation()
    assert calls.ring[0] is first
    assert [each.text for each in calls.ring] == ['split #1', 'barrier #2']
    assert calls.inside is None


def test_instruments_are_told_of_all_calls(instrument):
    def fails():
        raise ValueError('wrong')

    assert outer(lambda: inner(int)) == 0
    with pytest.raises(ValueError, match='wrong'):
        inner(fails)
    assert instrument.events == [
        'begin outer', 'begin inner', 'end inner: 0 None', 'end outer: 0 None', 'begin inner',
        "end inner: None ValueError('wrong')"]


@pytest.mark.mpi_skip
def test_a_forked_child_has_no_instruments(instrument):
    process = os.fork()
    if not process:
        inner(int)
        os._exit(len(instrument.events))
    assert os.waitpid(process, 0)[1] == 0


@pytest.fixture
def instrument():
    class Events:
        def __init__(self):
            self.events = []

        def begin(self, call):
            self.events.append(f'begin {call.operation}')

        def end(self, call, args, kwargs, result, error):
            assert call.owner is args[0]
            self.events.append(f'end {call.operation}: {result} {error!r}')

    events = Events()
    call.subscribe(events)
    call.subscribe(events)  # once
    yield events
    call.unsubscribe(events)


class Reports:
    """An object that a rank pickles in an operation."""

    def __reduce__(self):
        return str, (','.join(current()),)


def test_an_invalid_argument_leaves_nothing(comm):
    with pytest.raises(TypeError):
        comm.allreduce('text')
    with pytest.raises(TypeError):
        comm.send_obj(1, 'text')
    assert current() == []


def test_create_communicator_is_recorded(monkeypatch):
    found = []
    init = MpiCommunicatorBase.__init__

    def records(self, mpi_comm):
        found.extend((each.operation, flight_recorder.of_owner(each))
                     for each in call.of_thread(ME))
        init(self, mpi_comm)

    monkeypatch.setattr(MpiCommunicatorBase, '__init__', records)
    mpi_comm = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)
    chainermn.create_communicator('naive', mpi_comm).finalize()
    (name, (calls,)), = found
    assert name == 'create_communicator'
    assert calls.ranks == tuple(range(MPI.COMM_WORLD.size))[::-1]
    mpi_comm.Free()
    assert current() == []

