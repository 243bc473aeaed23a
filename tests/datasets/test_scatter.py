"""Scattering datasets: the amount of data that is sent, and errors."""

import contextlib
import itertools
import tracemalloc
import warnings

import numpy as np
import pytest
from chainer.datasets import TupleDataset
from each_case import each_case
from mpi4py import MPI
from shared_fixtures import communicators, raises_on_all

import chainermn
from chainermn.datasets import scatter

pytestmark = pytest.mark.every_size

N = 11

comm = communicators('naive', 'version7')


def arrays():
    return np.arange(2 * N, dtype=np.float32).reshape(N, 2), np.arange(N, dtype=np.int32)


class Broken:
    def __len__(self):
        raise OSError('no such folder')


@each_case('other, whole', itertools.product(
    [None, [], np.zeros(N), range(N), iter([]), Broken(), 'other'], [False, True]))
def test_ignored_data_sets(comm, other, whole):
    """One rank warns if others passed a dataset of another length, which they would miss."""
    root, n = comm.size - 1, N
    own = range(n) if whole else list(range(n))
    dataset = own if comm.rank == root else (
        list(range(3 + comm.rank)) if isinstance(other, str) else other)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        part = chainermn.scatter_dataset(dataset, comm, root=root)
    begin, end = scatter._shards(n, comm.size, True)[comm.rank]
    assert list(part[:]) == list(range(begin, end))
    texts = [str(each.message) for each in caught]
    if not isinstance(other, str) or comm.rank != root or comm.size == 1:
        assert texts == []
        return
    text, = texts
    assert f'the root, rank {root}' in text and f'  rank {root}: {n}' in text
    assert all(f'rank {rank}: {3 + rank}' in text for rank in range(root))
    assert caught[0].filename == __file__


@pytest.mark.compares_calls
@pytest.mark.parametrize('make, shuffle', [
    (lambda x: x, False), (lambda x: TupleDataset(x, x[:, 0]), True), (list, False), (list, True)])
def test_no_rank_has_more_than_a_part_at_once(comm, make, shuffle):
    x = np.zeros((1000, 1000), np.float32)
    dataset = make(x) if comm.rank == 0 else None
    tracemalloc.start()
    try:
        part = chainermn.scatter_dataset(dataset, comm, shuffle=shuffle)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(part) == -(-1000 // comm.size)
    at_once = 0 if comm.size == 1 or (comm.rank == 0 and dataset is x) else 1
    copies = 2 if isinstance(part._dataset, list) else 1  # pickled, and as objects
    assert peak < (at_once * copies / comm.size + 0.15) * x.nbytes


def test_the_root_keeps_a_view(comm):
    x, _ = arrays()
    part = chainermn.scatter_dataset(x, comm)
    assert (part._dataset is x) == (comm.rank == 0)


def test_without_a_seed_the_order_is_random_and_shared(comm):
    orders = []
    for _ in range(2):
        part = chainermn.scatter_dataset(np.arange(100), comm, shuffle=True,
                                         force_equal_length=False)
        orders.append([i for ours in comm.allgather_obj(part[:]) for i in ours])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(100))
    assert orders[0] != orders[1]


@pytest.mark.compares_calls
def test_takes_an_mpi4py_communicator(comm):
    expected = chainermn.scatter_dataset(np.arange(N), comm, shuffle=True, seed=3)
    for _ in range(3):
        part = chainermn.scatter_dataset(np.arange(N), comm.mpi_comm, shuffle=True, seed=3)
        assert part[:] == expected[:]
    assert chainermn.scatter_index(N, MPI.COMM_WORLD) == chainermn.scatter_index(N, comm)


def test_a_data_set_without_length_raises_on_all_ranks(comm):
    with raises_on_all(TypeError, 'the dataset of rank 0, the root, has no length'):
        chainermn.scatter_dataset(iter([1, 2]), comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('others, advice', [
    (None, 'passed None. Pass the dataset on rank 0 and None on the other ranks.'),
    ([1, 2], 'Pass the dataset on rank 0; or pass root=1 on all ranks, because rank 1 passed a ')])
def test_none_on_the_root_raises_on_all_ranks(comm, others, advice):
    with raises_on_all(TypeError, advice):
        chainermn.scatter_dataset(others if comm.rank else None, comm)


@pytest.mark.parametrize('seed, error_type', [(-1, ValueError), (2**32, ValueError),
                                              ('x', (TypeError, ValueError))])
def test_a_bad_seed_raises_on_all_ranks(comm, seed, error_type):
    with raises_on_all(error_type):
        chainermn.scatter_dataset([1], comm, shuffle=True, seed=seed if comm.rank == 0 else 0)


@pytest.mark.compares_calls
def test_an_error_of_pickling_raises_on_all_ranks(comm):
    # One rank need not pickle.
    with raises_on_all(Exception) if comm.size > 1 else contextlib.nullcontext():
        chainermn.scatter_dataset([lambda: None] * N, comm)


@pytest.mark.compares_calls
@pytest.mark.mpi(min_size=2)
def test_different_roots_raise_on_all_ranks(comm):
    with raises_on_all(Exception):
        chainermn.scatter_dataset([1, 2], comm, root=0 if comm.rank == 0 else 1)


@pytest.mark.compares_calls
def test_an_invalid_root_raises_on_all_ranks(comm):
    with raises_on_all(ValueError, 'root'):
        chainermn.scatter_dataset([1, 2], comm, root=comm.size)


@pytest.mark.parametrize('bad', [None, 'naive', 3])
def test_another_type_of_communicator_is_rejected(bad):
    with pytest.raises(TypeError, match='must be a ChainerMN or mpi4py communicator'):
        chainermn.scatter_dataset([1], bad)
    with pytest.raises(TypeError, match='must be a ChainerMN or mpi4py communicator'):
        chainermn.scatter_index(1, bad)


@pytest.mark.parametrize('n, error_type', [(-1, ValueError), (2.5, TypeError), ('3', TypeError)])
def test_a_bad_number_of_samples_raises_on_all_ranks(comm, n, error_type):
    with raises_on_all(error_type):
        chainermn.scatter_index(n if comm.rank == 0 else 3, comm)


@pytest.mark.parametrize('n, batch_size, iterations',
                         [(10, 3, 4), (10, 5, 2), (7, 2, 4), (0, 3, 0)])
def test_deprecated_epoch_triggers(comm, n, batch_size, iterations):
    n += 100 * comm.rank  # rank 0's counts
    with pytest.warns(DeprecationWarning, match='get_n_iterations_for_one_epoch'):
        got = scatter.get_n_iterations_for_one_epoch([0] * n, batch_size, comm)
    assert got == iterations
    with pytest.warns(DeprecationWarning, match='get_epoch_trigger'):
        trigger = scatter.get_epoch_trigger(3, [0] * n, batch_size, comm)
    assert trigger == (3 * iterations, 'iteration')
