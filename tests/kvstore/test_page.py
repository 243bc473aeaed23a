"""Programs of MXNet's page on KVStore, with the numbers that it prints.

Stores of one process give the numbers of the page, and so does ``dist_async``, where one rank
pushes here.  In ``dist_sync`` every rank pushes, so sums are multiplied by the number of ranks.
"""

import numpy as np
import pytest

SHAPE = (2, 3)


def ones():
    return np.ones(SHAPE, np.float32)


@pytest.fixture(params=[1_000_000, 1], ids=['full', 'split'])
def bound(request):
    return request.param


@pytest.fixture(params=['local', 'device', 'nccl', 'dist_sync', 'dist_device_sync', 'dist_async'])
def kv(request, create, bound):
    return create(request.param, bigarray_bound=bound)


@pytest.fixture
def n(kv):
    """Number of pushes that are summed when each rank pushes once."""
    return kv.num_workers if kv.type in ('dist_sync', 'dist_device_sync') else 1


@pytest.fixture
def push(kv):
    """Function that pushes, in ``dist_async`` only on the last rank, and waits for all ranks."""
    def push(*args, **kwargs):
        if kv.type != 'dist_async' or kv.rank == kv.num_workers - 1:
            kv.push(*args, **kwargs)
        kv.barrier()
    return push


@pytest.fixture
def check(kv):
    def check(x, value):
        np.testing.assert_array_equal(x, np.full(SHAPE, value, np.float32))
        kv.barrier()  # before the next push
    return check


def test_initialization(kv, check):
    kv.init(3, ones() * 2)
    a = np.zeros(SHAPE, np.float32)
    kv.pull(3, out=a)
    check(a, 2)


def test_push_aggregation_and_updater(kv, push, check, n):
    kv.init(3, ones() * 2)
    a = np.zeros(SHAPE, np.float32)
    push(3, ones() * 8)
    kv.pull(3, out=a)
    check(a, 8 * n)

    b = [ones() for _ in range(4)]
    push(3, b)
    kv.pull(3, out=a)
    check(a, 4 * n)

    printed = []

    def update(key, input, stored):
        printed.append(f'update on key: {key}')
        stored += input * 2

    kv._set_updater(update)
    kv.pull(3, out=a)
    check(a, 4 * n)
    push(3, ones())
    printed_by_server = kv._backend.gather(printed)
    if kv.rank == 0:
        n_shards = len(kv._layouts[3].shards)
        assert [line for lines in printed_by_server for line in lines] == \
            ['update on key: 3'] * n_shards
    kv.pull(3, out=a)
    check(a, 4 * n + 2 * n)


def doubling(kv):
    def update(key, input, stored):
        stored += input * 2
    kv._set_updater(update)


def test_list_key_value_pairs(kv, push, check, n):
    doubling(kv)
    keys = [5, 7, 9]
    kv.init(keys, [ones()] * len(keys))
    push(keys, [ones()] * len(keys))
    b = [np.zeros(SHAPE, np.float32)] * len(keys)
    kv.pull(keys, out=b)
    check(b[1], 1 + 2 * n)

    b = [[ones() for _ in range(4)]] * len(keys)
    push(keys, b)
    kv.pull(keys, out=b)
    check(b[1][1], 1 + 2 * n + 8 * n)


def row_sparse(x):
    """The page's tostype('row_sparse')."""
    from chainermn.kvstore import RowSparse
    return RowSparse.from_dense(x)


def zeros_row_sparse():
    return row_sparse(np.zeros(SHAPE, np.float32))


def test_reference_push_row_sparse(kv, push, check, n):
    b = zeros_row_sparse()
    kv.init('10', zeros_row_sparse())
    push('10', row_sparse(ones()))
    kv.row_sparse_pull('10', row_ids=np.array([0, 1]), out=b)
    check(b.todense(), n)


@pytest.mark.sample(24)
@pytest.mark.parametrize('row_ids, rows', [
    ([0, 2], [1, 0, 1]),
    ([2, 2], [0, 0, 1]),
    ([1, 0], [1, 1, 0]),
])
@pytest.mark.parametrize('kind', ['dense', 'row sparse'])
def test_reference_row_sparse_pull(kv, row_ids, rows, kind):
    shape = (3, 3)
    kv.init('3', row_sparse(np.ones(shape, np.float32)))
    a = np.full(shape, 7, np.float32)
    if kind == 'row sparse':
        a = row_sparse(a)
    kv.row_sparse_pull('3', out=a, row_ids=np.array(row_ids, np.int64))
    dense = a if kind == 'dense' else a.todense()
    np.testing.assert_array_equal(dense, np.outer(rows, [1, 1, 1]))


def test_reference_set_optimizer(kv, push):
    import chainer

    shape = (2, 2)
    weight = np.zeros(shape, np.float32)
    kv.init(3, weight)
    kv.set_optimizer(chainer.optimizers.SGD(lr=0.01))  # MXNet's default; Chainer's too
    grad = np.ones(shape, np.float32)
    push(3, grad)
    kv.pull(3, out=weight)
    n = kv.num_workers if 'sync' in kv.type and kv.type != 'dist_async' else 1
    assert weight.dtype == np.float32
    np.testing.assert_allclose(weight, -0.01 * n, rtol=1e-6)
