"""Unreferenced communicators are freed; too many raise the same error on all ranks."""

import gc
import threading

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn._transport import lifetime


@pytest.fixture
def few_communicators():
    """Leaves MPI about 40 free communicators."""
    taken = []
    try:
        while True:
            taken.append(MPI.COMM_SELF.Dup())
    except MPI.Exception:
        for mpi_comm in taken[-40:]:
            mpi_comm.Free()
    yield
    for mpi_comm in taken[:-40]:
        mpi_comm.Free()


def check(comm):
    assert comm.allreduce(np.ones(3))[0] == comm.size


def test_unreferenced_communicators_are_freed():
    for _ in range(50):
        check(chainermn.create_communicator('naive'))
    assert len(lifetime.runtime.get(lifetime._Communicators).held) < 30
    comm = chainermn.create_communicator('naive')
    before = len(lifetime.runtime.get(lifetime._Communicators).held)
    comm.finalize()
    assert len(lifetime.runtime.get(lifetime._Communicators).held) == before - 1


@pytest.mark.limit(200)
@pytest.mark.parametrize('name', ['naive', pytest.param('flat', marks=pytest.mark.full)])
def test_unreferenced_groups_are_freed(name, few_communicators):
    comm = chainermn.create_communicator(name)
    for n in range(60):
        part = comm.split(comm.rank % 2, comm.rank)
        if n % 20 == 0:
            part.allreduce(np.ones(10**5, 'f'))
        comm.new_group([0])
    del part
    check(comm)
    comm.finalize()


@pytest.mark.limit(200)
@pytest.mark.parametrize('name', ['naive', pytest.param('flat', marks=pytest.mark.full)])
def test_communicators_of_dropped_optimizers_are_freed(name, few_communicators):
    comm = chainermn.create_communicator(name)
    n_threads = threading.active_count()
    for _ in range(10):
        part = comm.split(0, comm.rank)
        model = L.Linear(3, 2)
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(), part, overlap='always').setup(model)
        for _ in range(2):
            optimizer.update(lambda model=model: F.sum(model(np.ones((2, 3), 'f'))))
        del part, model, optimizer
        gc.collect()
    assert threading.active_count() <= n_threads + 2
    check(comm)
    comm.finalize()


@pytest.mark.parametrize('name', ['naive', 'flat'])
def test_dropped_queue_with_more_gradients_on_some_ranks(name):
    comm = chainermn.create_communicator(name)
    n_threads = threading.active_count()
    queue = comm.split(0, comm.rank).mean_queue()
    for n in range(1 + comm.rank):
        means = queue.submit({'x': np.full(50000, n, 'f')})
    gc.collect()
    chainermn.create_communicator(name).finalize()
    assert threading.active_count() == n_threads
    assert (means[0] == 0).all() or comm.rank
    for call in (lambda: queue.submit({'x': np.zeros(3, 'f')}), queue.wait,
                 lambda: queue.gradients(L.Linear(3, 2), True, None, False)):
        with pytest.raises(RuntimeError, match='the communicator of this queue was freed'):
            call()
    check(comm)
    comm.finalize()


def test_communicator_in_use_on_one_rank_is_not_freed():
    comm = chainermn.create_communicator('naive')
    dropped = kept = chainermn.create_communicator('naive')
    if comm.rank:
        del kept
    del dropped
    gc.collect()
    chainermn.create_communicator('naive').finalize()
    if comm.size > 1 and comm.rank == 0:
        assert kept._flight_records()[0].key in lifetime.runtime.get(lifetime._Communicators).held
    comm.barrier()
    comm.finalize()


def test_communicator_with_message_in_flight_is_not_freed():
    """The receiver still uses the communicator that the sender has dropped."""
    comm = chainermn.create_communicator('naive')
    x = np.arange(10**6)
    if comm.rank:
        comm.isend(x, 0, 1)
        del comm
        gc.collect()
    for _ in range(3):
        chainermn.create_communicator('naive').finalize()
    if not MPI.COMM_WORLD.rank:
        for source in range(1, comm.size):
            np.testing.assert_array_equal(comm.recv(source, 1), x)


@pytest.mark.limit(200)
def test_too_many_communicators_raise_on_all_ranks(same_error, few_communicators):
    def create():
        comms = []
        try:
            while len(comms) < 200:
                comms.append(chainermn.create_communicator('naive'))
        except RuntimeError:
            check(comms[0])
            comms.clear()
            gc.collect()
            check(chainermn.create_communicator('naive'))
            raise

    error = same_error(create, table=False)
    assert type(error) is RuntimeError
    assert 'Call finalize() on unused communicators' in str(error)
