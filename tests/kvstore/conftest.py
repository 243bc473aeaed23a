"""Fixtures: stores of each type, and a check that all ranks raise the same error."""

import functools

import pytest

import chainermn
from chainermn import kvstore

#: Types that only differ from others on a GPU; laws/test_stores.py has some of them.
ON_DEVICE = [pytest.param(type, marks=pytest.mark.full)
             for type in ('device', 'nccl', 'dist_device_sync')]


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


@pytest.fixture(params=['local', 'dist_sync', 'dist_async', *ON_DEVICE])
def kv(request, create):
    """A store of each type."""
    return create(request.param)


@pytest.fixture(params=['dist_sync', 'dist_async'])
def dist(request, create):
    return create(request.param)


@pytest.fixture
def path(tmp_path, comm):
    """A file that is not there yet, the same on all ranks."""
    return comm.bcast_obj(str(tmp_path / 'a.name with.dots'))


@pytest.fixture
def same_error(same_error):
    """As for communicators; the errors need not have a line for each rank."""
    return functools.partial(same_error, table=False)
