"""Fixtures: stores of each type, and a check that all ranks raise the same error."""

import functools

import pytest

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
    """Function that makes a store and closes it after the test."""
    stores = []

    def create(type, **options):
        stores.append(kvstore.create(type, comm if type.startswith('dist') else None, **options))
        return stores[-1]

    yield create
    for store in stores:
        store.close()
        if store.type == 'dist_async':
            store._backend._service._thread.join()


@pytest.fixture(params=TYPES)
def kv(request, create):
    """A store of each type."""
    return create(request.param)


@pytest.fixture(params=['dist_sync', 'dist_async'])
def dist(request, create):
    return create(request.param)


@pytest.fixture
def same_error(same_error):
    """As for communicators; the errors need not have a line for each rank."""
    return functools.partial(same_error, table=False)
