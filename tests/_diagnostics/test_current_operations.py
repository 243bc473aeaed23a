"""Each thread records the operations that it is in, and only these."""

import threading

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn._diagnostics import current_operations
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase

ME = threading.get_ident()


def current():
    """The operations of this thread, the innermost first."""
    return [operation.name for operation in current_operations.of_thread(threading.get_ident())]


@current_operations.recorded('outer')
def outer(function):
    return function()


@current_operations.recorded('inner')
def inner(function):
    return function()


def test_operations_nest():
    assert current() == []
    assert outer(lambda: (current(), inner(current), current())) == (
        ['outer'], ['inner', 'outer'], ['outer'])
    assert outer(lambda: inner(current_operations.outermost)) == 'outer'
    assert (current(), current_operations.outermost()) == ([], '')


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
    assert [each.name for each in current_operations.of_thread(thread.ident)] == ['inner']
    assert current() == []
    checked.set()
    thread.join()
    assert current_operations.of_thread(thread.ident) == []


def test_nothing_remains_of_a_thread_that_has_ended():
    before = len(current_operations._threads)
    threads = [threading.Thread(target=outer, args=[current]) for _ in range(5)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(current_operations._threads) <= before


def test_the_flight_records_of_an_owner(comm):
    class Freed:
        def _flight_records(self):
            raise RuntimeError

    @current_operations.recorded('operation')
    def operation(owner):
        return current_operations.of_thread(ME)[0].calls

    assert operation(comm) == comm._flight_records()
    assert operation(comm._flight_records()[0]) == comm._flight_records()[:1]
    assert operation(Freed()) == operation(None) == ()


class Reports:
    """An object that a rank pickles in an operation."""

    def __reduce__(self):
        return str, (','.join(current()),)


def test_operations_of_a_communicator_are_recorded(comm):
    assert set(comm.allgather_obj(Reports())) == {'allgather_obj'}
    comm.send_obj(Reports(), comm.rank)
    assert comm.recv_obj(comm.rank) == 'send_obj'
    assert comm.serve(lambda source, request: [','.join(current()).encode()]).ask(
        {comm.rank: []})[comm.rank].tobytes() == b'ask'
    assert current() == []


def test_an_invalid_argument_leaves_nothing(comm):
    with pytest.raises(TypeError):
        comm.allreduce('text')
    with pytest.raises(TypeError):
        comm.send_obj(1, 'text')
    assert current() == []


def test_refuse_is_an_operation(comm, monkeypatch):
    names = []
    check = comm._consistency
    monkeypatch.setattr(check, 'refuse', lambda name, error: names.extend(current()))
    comm.refuse('load', ValueError('damaged'))
    assert names == ['refuse']


@pytest.mark.parametrize('timeline', [False, True])
def test_a_timeline_changes_nothing(timeline):
    comm = chainermn.create_communicator('naive')
    if timeline:
        class Tracer:
            is_inside = False

            def time(self, name, calls, method, args, kwargs):
                return method(*args, **kwargs)

        comm._tracer = Tracer()
    assert set(comm.allgather_obj(Reports())) == {'allgather_obj'}
    comm.finalize()


def test_create_communicator_is_recorded(monkeypatch):
    found = []
    init = MpiCommunicatorBase.__init__

    def records(self, mpi_comm):
        found.extend(current_operations.of_thread(ME))
        init(self, mpi_comm)

    monkeypatch.setattr(MpiCommunicatorBase, '__init__', records)
    mpi_comm = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)
    chainermn.create_communicator('naive', mpi_comm).finalize()
    (name, (calls,)), = found
    assert name == 'create_communicator'
    assert calls.ranks == tuple(range(MPI.COMM_WORLD.size))[::-1]
    mpi_comm.Free()
    assert current() == []


class OwnMean(MpiCommunicatorBase):
    """A communicator of the user's."""

    def multi_node_mean_grad(self, model, zero_fill=False, compression=None):
        for _, parameter in sorted(model.namedparams()):
            parameter.grad[...] = self.multi_node_mean(parameter.grad)


def test_own_communicators_record_what_they_call(monkeypatch):
    comm = OwnMean(MPI.COMM_WORLD)
    seen = []
    for check in ('same', 'gather_equal'):  # for one rank, and for several
        exchange = getattr(comm._consistency, check)
        monkeypatch.setattr(comm._consistency, check, lambda *args, exchange=exchange: (
            seen.extend(current()), exchange(*args))[1])
    model = chainer.links.Linear(2, 2)
    model.W.grad = np.full((2, 2), comm.rank, 'f')
    model.b.grad = np.full(2, comm.rank, 'f')
    comm.multi_node_mean_grad(model)
    assert seen == ['multi_node_mean'] * 2
    assert np.allclose(model.W.grad, (comm.size - 1) / 2)
    comm.finalize()
