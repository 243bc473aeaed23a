"""Stores of every type, and errors compared between ranks."""

import pytest
from mpi4py import MPI

import chainermn
from chainermn import kvstore

LOCAL = ['local', 'device', 'nccl']
SYNC = ['dist_sync', 'dist_device_sync']
TYPES = [*LOCAL, *SYNC, 'dist_async']


@pytest.fixture(scope='session')
def comm():
    comm = chainermn.create_communicator('naive')
    yield comm
    comm.finalize()


@pytest.fixture
def create(comm):
    """Makes stores that are closed after the test: ``create(type, bigarray_bound=...)``."""
    stores = []

    def create(type, **options):
        stores.append(kvstore.create(type, comm if type.startswith('dist') else None, **options))
        return stores[-1]

    yield create
    for store in stores:
        store.close()
        if store.type == 'dist_async':
            store._service._thread.join()


@pytest.fixture(params=TYPES)
def kv(request, create):
    """A store of each type."""
    return create(request.param)


@pytest.fixture(params=['dist_sync', 'dist_async'])
def dist(request, create):
    return create(request.param)


@pytest.fixture
def same_error():
    """Calls a function on all ranks; gives its error, which has to be the same on all."""
    def same_error(call, *args):
        try:
            error, said = None, repr(call(*args))
        except Exception as caught:
            error, said = caught, str(caught)
        all_said = MPI.COMM_WORLD.allgather((type(error), said))
        assert error is not None and len(set(all_said)) == 1, all_said
        return error
    return same_error
