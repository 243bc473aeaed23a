"""create: types, communicators, and errors."""

import numpy as np
import pytest

import chainermn
from chainermn import kvstore


@pytest.mark.parametrize('type', ['local', 'device', 'nccl', 'dist_sync', 'dist_device_sync',
                                  'dist_async'])
def test_types(create, type, comm):
    kv = create(type)
    assert isinstance(kv, kvstore.KVStore)
    assert kv.type == type
    assert (kv.rank, kv.num_workers) == \
        ((comm.rank, comm.size) if type.startswith('dist') else (0, 1))
    with pytest.raises(AttributeError):
        kv.rank = 3


def test_the_default_is_local():
    assert kvstore.create().type == 'local'
    assert chainermn.kvstore is kvstore


def test_makes_its_own_communicator(comm):
    kv = kvstore.create('dist_sync')
    assert (kv.rank, kv.num_workers) == (comm.rank, comm.size)
    kv.init(0, np.ones(2))
    kv.push(0, np.ones(2))
    np.testing.assert_array_equal(kv.pull(0), np.full(2, comm.size))


def test_part_of_the_ranks(comm):
    """Stores of two groups are independent."""
    group = comm.split(comm.rank % 2, comm.rank)
    with kvstore.create('dist_async', group) as kv:
        assert kv.num_workers == group.size
        kv.init(0, np.full(3, comm.rank % 2))
        np.testing.assert_array_equal(kv.pull(0), np.full(3, comm.rank % 2))
    kv._backend._service._thread.join()
    group.finalize()


@pytest.mark.parametrize(('name', 'expected'), [
    ('dist', 'dist_sync'), ('dist_sync_device', 'dist_device_sync')])
def test_other_names_of_mxnet(name, expected, comm):
    assert kvstore.create(name, comm).type == expected


@pytest.mark.parametrize('name', ['mpi', 'p3', '', None, 3, []])
def test_unknown_type(name, comm, same_error):
    error = same_error(kvstore.create, name)
    assert isinstance(error, ValueError)
    assert 'choose one of local, device, nccl, dist_sync' in str(error)
    error = same_error(kvstore.create, name if comm.rank == 0 else 'dist_sync', comm)
    assert isinstance(error, ValueError)
    assert 'unknown KVStore type' in str(error)


def test_bad_arguments(comm, same_error):
    with pytest.raises(TypeError, match='ChainerMN communicator'):
        kvstore.create('dist_sync', comm.mpi_comm)
    for bound in (0, -1, '1', True):
        bad = bound if comm.rank == comm.size - 1 else 1
        for communicator in (comm, None):
            error = same_error(lambda bad=bad, communicator=communicator: kvstore.create(
                'dist_sync', communicator, bigarray_bound=bad))
            assert isinstance(error, ValueError)
            assert 'bigarray_bound' in str(error)


def test_the_bound_may_be_any_number(comm):
    for bound in (3, 3., np.int64(3), np.float32(3), float('inf')):
        kv = kvstore.create('dist_sync', comm, bigarray_bound=bound)
        kv.init('x', np.zeros(3))
        assert kv._layouts['x'].is_split == (bound == 3 and comm.size > 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('options', [
    lambda rank: {'name': 'dist_async' if rank else 'dist_sync'},
    lambda rank: {'name': 'dist_sync', 'bigarray_bound': 10 + rank},
])
def test_different_arguments_on_the_ranks(comm, same_error, options):
    error = same_error(lambda: kvstore.create(communicator=comm, **options(comm.rank)))
    assert isinstance(error, ValueError)
    assert 'the ranks made different calls' in str(error) and len(str(error).splitlines()) > 3
    comm.barrier()
