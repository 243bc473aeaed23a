"""dist_sync: the same bits and errors on all ranks; dist_async: no push is lost, no rank waits."""

import re
import threading
import time

import numpy as np
import pytest

from chainermn.kvstore import RowSparse

X = np.zeros((4, 3), np.float32)


def random(rank, step=0, shape=X.shape):
    return (np.random.RandomState(100 * step + rank).randn(*shape) * 10.**rank).astype(np.float32)


def test_keys_are_assigned_to_the_ranks_in_turn(create, comm):
    kv = create('dist_sync', bigarray_bound=100)
    keys = list(range(2 * comm.size))
    kv.init([*keys, 'large'], [np.zeros(2)] * len(keys) + [np.zeros(100)])
    mine = {key_id: x.shape for key_id, x in kv._backend.server.shards.items()}
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
        assert 'the ranks made different calls' in str(error) and 'rank 1: KVStore.' in str(error)
        assert np.all(kv.pull('a') == 0)  # nothing was merged
    for call in (lambda: kv.push('a', X) if odd else kv.pull('a'),
                 lambda: kv.push('a', X) if odd else comm.barrier()):
        error = same_error(call)
        assert isinstance(error, ValueError) and 'rank 1: KVStore.push (alltoall' in str(error)


@pytest.mark.mpi(min_size=2)
def test_different_methods_on_the_ranks(dist, same_error, comm):
    def call():
        if comm.rank == 1:
            dist.init('x', X)
        else:
            dist.set_updater(max)

    error = same_error(call)
    assert isinstance(error, ValueError)
    lines = str(error).splitlines()
    assert re.match(r'  rank.* 0.*: KVStore\.set_updater \(allgather_obj\)', lines[1])
    assert lines[2].startswith("  rank 1: KVStore.init 'x' (allgather_obj)")
    assert 'extension' not in lines[3]
    dist.init('x', X)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('call, text', [
    (lambda store: store.init('x', X), "init 'x' (allgather_obj)"),
    (lambda store: store.init([*'abcde'], [X] * 5), "init 'a', 'b', 'c', ... (allgather_obj)"),
    (lambda store: store.set_updater(max), 'set_updater (allgather_obj)'),
    (lambda store: store.barrier(), 'barrier (barrier)')])
def test_a_method_on_one_rank_only(dist, same_error, comm, call, text):
    error = same_error(lambda: call(dist) if comm.rank == 1 else comm.bcast_obj(1))
    assert f'  rank 1: KVStore.{text}' in str(error)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('value', [lambda rank: np.zeros(2 + rank), lambda rank: np.zeros(2, 'fd'[
    rank > 0]), lambda rank: RowSparse([], np.zeros((0,)), (2,)) if rank else np.zeros(2)])
def test_different_values_in_init(dist, same_error, value):
    error = same_error(dist.init, 'x', value(dist.rank))
    assert isinstance(error, ValueError)
    assert "  rank 0: KVStore.init 'x': " in str(error)
    error = same_error(dist.init, f'x{dist.rank}', np.zeros(2))
    assert "rank 0: KVStore.init 'x0' (allgather_obj)" in str(error)
    dist.init('x', np.zeros(2))
    assert dist.pull('x').shape == (2,)


@pytest.mark.mpi(min_size=2)
def test_an_error_of_one_rank_names_the_method_on_all(create, comm, same_error):
    kv = create('dist_sync')
    kv.init('w', np.zeros(4))
    for name in ('push', 'pull'):
        error = same_error(getattr(kv, name), 'w', np.ones(4 + (comm.rank == 1)))
        assert f'KVStore.{name} failed on rank 1' in str(error)
        assert f': KVStore.{name}\n' in str(error)
        assert 'alltoall' not in str(error) and 'allgather' not in str(error)


def test_an_updater_that_raises(create, comm, same_error):
    """Its error is raised on its rank, and at the next call on all other ranks."""
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


# --- dist_async ---


def adding(kv):
    def update(key, input, stored):
        before = stored.copy()
        time.sleep(0)  # lets another thread run, whose update must not come between
        stored[...] = before + input
    kv.set_updater(update)


def pushes_of(rank, shapes):
    """Keys and integer arrays that a rank pushes, in a random order."""
    random = np.random.RandomState(rank)
    for _ in range(30):
        keys = random.permutation(len(shapes))[:random.randint(1, len(shapes))].tolist()
        yield keys, [random.randint(-9, 10, shapes[key]) for key in keys]


def test_nothing_is_lost(create, comm):
    """All pushes are summed, in whatever order they arrive."""
    shapes = [(3,), (40, 5), (1,), (7, 2), (1000,)]
    kv = create('dist_async', bigarray_bound=100)
    kv.init(list(range(5)), [np.zeros(shape, int) for shape in shapes])
    adding(kv)
    for n, (keys, values) in enumerate(pushes_of(comm.rank, shapes)):
        kv.push(keys, values)
        if n % 7 == comm.rank:
            time.sleep(.002)
        if n % 5 == 0:
            assert [x.shape for x in kv.pull(keys)] == [shapes[key] for key in keys]
    kv.barrier()
    expected = [np.zeros(shape, int) for shape in shapes]
    for rank in range(comm.size):
        for keys, values in pushes_of(rank, shapes):
            for key, value in zip(keys, values, strict=True):
                expected[key] += value
    for x, y in zip(kv.pull(list(range(5))), expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_several_threads_of_a_rank_push(create, comm):
    kv = create('dist_async', bigarray_bound=4)
    kv.init([0, 'split'], [np.zeros(3, int), np.zeros(10, int)])
    adding(kv)

    def push():
        for _ in range(20):
            kv.push([0, 'split'], [np.ones(3, int), np.ones(10, int)])

    threads = [threading.Thread(target=push) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kv.barrier()
    assert (kv.pull(0) == 60 * comm.size).all() and (kv.pull('split') == 60 * comm.size).all()


@pytest.mark.mpi(min_size=2)
def test_serves_while_the_rank_waits_in_mpi(create, comm):
    """Rank 0 makes no call until the others have trained, also with the keys that it serves."""
    kv = create('dist_async', bigarray_bound=4)
    kv.init([0, 'split'], [np.zeros(3, int), np.zeros(10, int)])
    adding(kv)
    steps = 30
    if comm.rank > 0:
        for _ in range(steps):
            kv.push([0, 'split'], [np.ones(3, int), np.ones(10, int)])
            kv.pull([0, 'split'])
        comm.send_obj('trained', 0)
    else:
        for rank in range(1, comm.size):
            assert comm.recv_obj(rank) == 'trained'
    comm.barrier()
    assert (kv.pull(0) == steps * (comm.size - 1)).all()
    kv.barrier()


def test_an_updater_that_raises_in_a_server(create, comm):
    """Raises on the rank that pushed; the servers continue."""
    def update(key, input, stored):
        if (input < 0).any():
            raise ArithmeticError(f'negative {key}')
        stored += input

    kv = create('dist_async')
    keys = list(range(comm.size))
    kv.init(keys, [np.zeros(2, int)] * comm.size)
    kv.set_updater(update)
    if comm.rank == comm.size - 1:
        for key in keys:
            with pytest.raises(ArithmeticError, match=f'negative {key}'):
                kv.push(key, np.full(2, -1))
    kv.push(keys, [np.ones(2, int)] * comm.size)
    kv.barrier()
    assert all((x == comm.size).all() for x in kv.pull(keys))
    kv.barrier()
