"""All ranks push and pull together: the same bits everywhere, and errors on all of them."""

import numpy as np
import pytest

from chainermn.kvstore import RowSparse

pytestmark = pytest.mark.every_size

X = np.zeros((4, 3), np.float32)


def random(rank, step=0, shape=X.shape):
    return (np.random.RandomState(100 * step + rank).randn(*shape) * 10.**rank).astype(np.float32)


@pytest.mark.parametrize('bound', [1_000_000, 1], ids=['whole', 'cut'])
@pytest.mark.parametrize('type', ['dist_sync', 'dist_device_sync'])
def test_same_bits_on_all_ranks(create, comm, type, bound):
    """Those of the sum by rank."""
    kv = create(type, bigarray_bound=bound)
    kv.init(['a', 'b'], [X, X])
    for step in range(5):
        kv.push(['a', 'b'], [random(kv.rank, step), random(kv.rank, step + 50)])
        expected = [random(0, step), random(0, step + 50)]
        for rank in range(1, comm.size):
            expected[0] += random(rank, step)
            expected[1] += random(rank, step + 50)
        for x, y in zip(kv.pull(['a', 'b']), expected, strict=True):
            assert x.tobytes() == y.tobytes()


def test_an_updater_is_called_once_with_the_sum(create, comm):
    kv = create('dist_sync', bigarray_bound=8)
    kv.init(['small', 'large'], [np.zeros(2), np.zeros((4, 2))])
    calls = []

    def update(key, input, stored):
        calls.append((key, stored.shape))
        stored += input

    kv.set_updater(update)
    kv.push(['small', 'large'], [np.ones(2), np.ones((4, 2))])
    calls = [call for calls in comm.allgather_obj(calls) for call in calls]
    assert calls.count(('small', (2,))) == 1
    if comm.size == 1:
        assert calls[1:] == [('large', (4, 2))]
    else:
        large = [shape for key, shape in calls if key == 'large']
        assert len(large) == comm.size and sum(n for n, in large) == 8
    np.testing.assert_array_equal(kv.pull('large'), np.full((4, 2), comm.size))


def test_keys_go_to_the_ranks_in_turn(create, comm):
    kv = create('dist_sync', bigarray_bound=100)
    keys = list(range(2 * comm.size))
    kv.init([*keys, 'large'], [np.zeros(2)] * len(keys) + [np.zeros(100)])
    mine = {number: x.shape for number, x in kv._server.stored.items()}
    lengths = [100 * (rank + 1) // comm.size - 100 * rank // comm.size for rank in range(comm.size)]
    assert mine == {comm.rank: (2,), comm.rank + comm.size: (2,),
                    len(keys): (lengths[comm.rank],)}


@pytest.mark.mpi(min_size=2)
def test_different_keys_on_the_ranks(create, comm, same_error):
    kv = create('dist_sync')
    kv.init(['a', 'b', 'r'], [X, X, RowSparse([0], X[:1], X.shape)])
    odd = comm.rank == 1
    for call in (lambda: kv.push('b' if odd else 'a', X),
                 lambda: kv.pull('b' if odd else 'a'),
                 lambda: kv.push(['a'] if odd else ['a', 'b'], [X] if odd else [X, X]),
                 lambda: kv.row_sparse_pull(['r', 'r'] if odd else 'r', row_ids=[0])):
        error = same_error(call)
        assert isinstance(error, ValueError)
        assert 'the ranks do not call the same' in str(error) and 'rank 1: KVStore.' in str(error)
        assert np.all(kv.pull('a') == 0)  # nothing was merged
    error = same_error(lambda: kv.push('a', X) if odd else kv.pull('a'))
    assert isinstance(error, ValueError) and 'different verbs' in str(error)
    error = same_error(lambda: kv.push('a', X) if odd else comm.barrier())
    assert isinstance(error, ValueError) and 'different verbs' in str(error)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('value', [lambda rank: np.zeros(2 + rank), lambda rank: np.zeros(2, 'fd'[
    rank > 0]), lambda rank: RowSparse([], np.zeros((0,)), (2,)) if rank else np.zeros(2)])
def test_different_values_in_init(dist, same_error, value):
    error = same_error(dist.init, 'x', value(dist.rank))
    assert isinstance(error, ValueError)
    assert "rank 1: KVStore.init 'x': " in str(error)
    error = same_error(dist.init, f'x{dist.rank}', np.zeros(2))
    assert "rank 0: KVStore.init 'x0': float64 (2,)" in str(error)
    dist.init('x', np.zeros(2))
    assert dist.pull('x').shape == (2,)


def test_an_updater_that_raises(create, comm, same_error):
    """Its error is raised where it happened and, at the next call, everywhere else."""
    def update(key, input, stored):
        if key == 'bad':
            raise ArithmeticError('no such update')
        stored += input

    kv = create('dist_sync')
    kv.init(['good', 'bad'], [np.zeros(2), np.zeros(2)])
    kv.set_updater(update)

    def push_and_pull():
        kv.push(['good', 'bad'], [np.ones(2), np.ones(2)])
        kv.pull('good')

    error = same_error(push_and_pull)
    assert isinstance(error, ArithmeticError) and 'no such update' in str(error)
    kv.push('good', np.ones(2))
    assert kv.pull('good').tolist() == [2 * comm.size] * 2
