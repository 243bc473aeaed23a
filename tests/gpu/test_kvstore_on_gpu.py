"""KVStore with arrays on GPUs: the same values as on the host, stored where the type says."""

import chainer
import numpy as np
import pytest

import chainermn
from chainermn import kvstore

cupy = pytest.importorskip('cupy')
pytestmark = pytest.mark.gpu

X = np.arange(6, dtype=np.float32).reshape(2, 3)
TYPES = ['local', 'device', 'nccl', 'dist_sync', 'dist_device_sync', 'dist_async']


@pytest.fixture(scope='module')
def comm():
    return chainermn.create_communicator('naive')


@pytest.fixture(params=TYPES)
def kv(request, comm):
    with kvstore.create(request.param, comm, bigarray_bound=4) as kv:
        yield kv


def pushes(kv):
    return kv.num_workers if kv.type in ('dist_sync', 'dist_device_sync') else 1


@pytest.mark.parametrize('compression', [None, {'type': '2bit', 'threshold': 1.}])
def test_push_and_pull(kv, compression):
    kv.init('w', cupy.zeros((2, 3), np.float32))
    if compression:
        kv.set_gradient_compression(compression)
    one = cupy.ones((2, 3), np.float32)
    kv.push('w', [one, one])
    kv.barrier()
    out = cupy.zeros((2, 3), np.float32)
    host = np.zeros((2, 3), np.float32)
    kv.pull('w', out=[out, host])
    sent = 1 if compression and kv.type.startswith('dist') else 2
    np.testing.assert_array_equal(host, np.full((2, 3), sent * pushes(kv)))
    np.testing.assert_array_equal(cupy.asnumpy(out), host)
    shards = kv._backend.server.shards
    assert isinstance(shards.get(0, out), cupy.ndarray) == \
        (kv.type in ('device', 'nccl', 'dist_device_sync') or 0 not in shards)


def test_row_sparse(kv):
    kv.init('e', kvstore.RowSparse.from_dense(cupy.asarray(X)))
    dense = cupy.ones((2, 3), np.float32)
    sparse = kvstore.RowSparse([0], cupy.ones((1, 3), np.float32), (2, 3))
    kv.row_sparse_pull('e', out=[dense, sparse], row_ids=cupy.array([1, 1]))
    np.testing.assert_array_equal(cupy.asnumpy(dense), X * [[0], [1]])
    assert isinstance(sparse.rows, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(sparse.todense()), X * [[0], [1]])
    kv.barrier()
    kv.push('e', kvstore.RowSparse([1], cupy.ones((1, 3), np.float32), (2, 3)))
    kv.barrier()
    found = kv.row_sparse_pull('e', row_ids=cupy.array([0, 1]))
    np.testing.assert_array_equal(chainer.cuda.to_cpu(found.todense()),
                                  np.outer([0, pushes(kv)], [1, 1, 1]))

