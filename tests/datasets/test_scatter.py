"""Scattering data sets: the examples of each rank, and the amount of data that is sent."""

import contextlib
import itertools
import tracemalloc
import warnings

import numpy as np
import pytest
from chainer.dataset import DatasetMixin
from chainer.datasets import (
    ConcatenatedDataset,
    DictDataset,
    LabeledImageDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
)
from each_case import each_case
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from shared_fixtures import communicators, raises_on_all

import chainermn
from chainermn.datasets import scatter

pytestmark = pytest.mark.every_size

N = 11

comm = communicators('naive', 'version7')


# What ChainerMN 7.8.1 gives for (samples, ranks); found by running it.
EQUAL = {
    (0, 3): [(0, 0), (0, 0), (0, 0)],
    (1, 3): [(0, 1), (0, 1), (0, 1)],
    (2, 4): [(0, 1), (0, 1), (1, 2), (1, 2)],
    (5, 2): [(0, 3), (2, 5)],
    (6, 4): [(0, 2), (1, 3), (3, 5), (4, 6)],
    (7, 3): [(0, 3), (2, 5), (4, 7)],
    (12, 4): [(0, 3), (3, 6), (6, 9), (9, 12)],
    (1797, 4): [(0, 450), (449, 899), (898, 1348), (1347, 1797)],
}
DISJOINT = {
    (0, 3): [(0, 0), (0, 0), (0, 0)],
    (1, 3): [(0, 1), (1, 1), (1, 1)],
    (5, 2): [(0, 3), (3, 5)],
    (6, 4): [(0, 2), (2, 4), (4, 5), (5, 6)],
    (7, 3): [(0, 3), (3, 5), (5, 7)],
    (1797, 4): [(0, 450), (450, 899), (899, 1348), (1348, 1797)],
}


@pytest.mark.parametrize('equal, known', [(True, EQUAL), (False, DISJOINT)])
def test_shards_are_those_of_chainermn_7(equal, known):
    for (n, size), expected in known.items():
        assert scatter._shards(n, size, equal) == expected


@given(n=st.integers(0, 500), size=st.integers(1, 50))
def test_shards_cover_all(n, size):
    equal = scatter._shards(n, size, True)
    disjoint = scatter._shards(n, size, False)
    assert {end - begin for begin, end in equal} == {-(-n // size)}
    assert [i for begin, end in disjoint for i in range(begin, end)] == list(range(n))
    for shards in (equal, disjoint):
        assert {i for begin, end in shards for i in range(begin, end)} == set(range(n))
        lengths = [end - begin for begin, end in shards]
        assert max(lengths) - min(lengths) <= 1


@each_case('n, equal', itertools.product([0, 1, 5, 12, 1797], [True, False]))
def test_scatter_index(comm, n, equal):
    root = comm.size - 1
    on_root = comm.rank == root
    shard = chainermn.scatter_index(n if on_root else None, comm, root, force_equal_length=equal)
    assert shard == scatter._shards(n, comm.size, equal)[comm.rank]
    assert [type(i) for i in shard] == [int, int]


def arrays():
    return np.arange(2 * N, dtype=np.float32).reshape(N, 2), np.arange(N, dtype=np.int32)


class Bare:
    """The least a data set can be."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return {'square': i * i}


class Swapped(TupleDataset):
    """Gives other examples than its base class would."""

    def __getitem__(self, i):
        return super().__getitem__(i)[::-1]


class Mixed(DatasetMixin):
    def __len__(self):
        return N

    def get_example(self, i):
        return i, str(i)


def plus_one(example):
    return example + 1


MADE_OF_ARRAYS = {
    'array': lambda: arrays()[0],
    'Fortran array': lambda: np.asfortranarray(arrays()[0]),
    'list': lambda: [f'example {i}' for i in range(N)],
    'tuple': lambda: tuple(range(N)),
    'list of pairs': lambda: list(zip(*arrays(), strict=True)),
    'TupleDataset': lambda: TupleDataset(*arrays()),
    'TupleDataset of lists': lambda: TupleDataset(list(range(N)), [str(i) for i in range(N)]),
    'DictDataset': lambda: DictDataset(x=arrays()[0], t=arrays()[1]),
    'SubDataset': lambda: SubDataset(np.arange(N + 5), 3, N + 3),
    'SubDataset with order': lambda: SubDataset(
        TupleDataset(range_array(), range_array() * 2), 2, N + 2,
        np.random.RandomState(0).permutation(N + 5)),
    'SubDataset with list as order': lambda: SubDataset(range_array(), 0, N, [*range(N + 5)][::-1]),
    'ConcatenatedDataset': lambda: ConcatenatedDataset(
        np.arange(4), [], [str(i) for i in range(N - 6)], np.arange(2.0)),
    'TransformDataset': lambda: TransformDataset(np.arange(N), plus_one),
}
SENT_WHOLE = {
    'bare': Bare,
    'mixin': Mixed,
    'subclass of TupleDataset': lambda: Swapped(*arrays()),
    'TupleDataset with one unknown': lambda: TupleDataset(np.arange(N), Bare()),
    'range': lambda: range(N),
}


def range_array():
    return np.arange(N + 5)


def check_equal(got, expected):
    np.testing.assert_equal(got, expected)
    if isinstance(expected, (tuple, list)):
        assert type(got) is type(expected)
        for one, other in zip(got, expected, strict=True):
            check_equal(one, other)
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype


@each_case('name, shuffle, equal', [
    (name, shuffle, (i + shuffle) % 2 == 0) for i, name in enumerate(MADE_OF_ARRAYS | SENT_WHOLE)
    for shuffle in (False, True)])
def test_each_rank_gets_the_examples_of_its_shard(comm, name, shuffle, equal):
    """No other example travels to it, if the data set can be divided."""
    root, make = comm.size - 1, (MADE_OF_ARRAYS | SENT_WHOLE)[name]
    part = chainermn.scatter_dataset(
        make() if comm.rank == root else [], comm, root=root, shuffle=shuffle, seed=7,
        force_equal_length=equal)

    begin, end = scatter._shards(N, comm.size, equal)[comm.rank]
    order = np.random.RandomState(7).permutation(N) if shuffle else np.arange(N)
    dataset = make()
    expected = [dataset[i] for i in order[begin:end].tolist()]
    assert isinstance(part, SubDataset)
    assert len(part) == end - begin
    for i, example in enumerate(expected):
        check_equal(part[i], example)
        check_equal(part[i - len(part)], example)
    check_equal(part[:], expected)
    check_equal(part[1::2], expected[1::2])
    with pytest.raises(IndexError):
        part[len(part)]
    if name in MADE_OF_ARRAYS:  # no copy on the root
        assert len(part._dataset) == (N if comm.rank == root else len(part))


class Broken:
    def __len__(self):
        raise OSError('no such folder')


@each_case('other, whole', itertools.product(
    [None, [], np.zeros(N), range(N), iter([]), Broken(), 'other'], [False, True]))
def test_ignored_data_sets(comm, other, whole):
    """One rank warns if others passed a data set of another length, which they would miss."""
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


def test_arrays_travel_as_arrays(comm):
    part = chainermn.scatter_dataset(TupleDataset(*arrays()), comm, shuffle=True, seed=0)
    assert [type(column) for column in part._dataset._datasets] == [np.ndarray, np.ndarray]


class Untouchable(Bare):
    def __getitem__(self, i):
        raise AssertionError('an example was read while scattering')


@pytest.mark.parametrize('shuffle', [False, True])
def test_no_example_is_read(comm, shuffle):
    images = LabeledImageDataset([(f'no/such/image{i}.png', i) for i in range(N)])
    for dataset in (Untouchable(), images, TransformDataset(Untouchable(), plus_one)):
        part = chainermn.scatter_dataset(dataset, comm, shuffle=shuffle)
        assert len(part) == -(-N // comm.size)
        with pytest.raises((AssertionError, FileNotFoundError)):
            part[0]


def test_a_transform_runs_each_time_an_example_is_used(comm):
    calls.clear()
    part = chainermn.scatter_dataset(TransformDataset(np.arange(N), remember), comm)
    assert calls == []
    first = part[0]
    assert (part[0], calls) == (first, [first, first])


calls = []


def remember(example):
    calls.append(example)
    return example


def test_the_root_keeps_its_own_objects(comm):
    items = [[i] for i in range(N)]
    part = chainermn.scatter_dataset(items, comm)
    if comm.rank == 0:
        assert all(mine is item for mine, item in zip(part[:], items, strict=False))


@pytest.mark.parametrize('shuffle', [False, True])
def test_an_empty_data_set(comm, shuffle):
    part = chainermn.scatter_dataset([], comm, shuffle=shuffle, seed=1)
    assert (len(part), part[:]) == (0, [])


def test_fewer_examples_than_ranks(comm):
    part = chainermn.scatter_dataset(['only'], comm)
    assert part[:] == ['only']
    part = chainermn.scatter_dataset(['only'], comm, force_equal_length=False)
    assert part[:] == (['only'] if comm.rank == 0 else [])


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


def test_scatters_within_a_split_communicator(comm):
    half = comm.split(comm.rank % 2, comm.rank)
    part = chainermn.scatter_dataset([comm.rank] * N, half, root=half.size - 1)
    last = max(rank for rank in range(comm.size) if rank % 2 == comm.rank % 2)
    assert part[:] == [last] * -(-N // half.size)
    half.finalize()


def test_a_data_set_without_length_raises_on_all_ranks(comm):
    with raises_on_all(TypeError, 'the data set of the root has no length'):
        chainermn.scatter_dataset(iter([1, 2]), comm)


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


def test_data_size_error_is_kept():
    assert issubclass(chainermn.DataSizeError, RuntimeError)


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
