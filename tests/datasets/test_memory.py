"""scatter_dataset estimates a dataset before it sends it, so that no rank runs out of memory."""

import pickle

import chainer
import numpy as np
import pytest
from shared_fixtures import communicators

import chainermn
from chainermn.datasets import _memory

MB = 10**6


class Images(chainer.dataset.DatasetMixin):
    """A dataset of the program, which is sent to all ranks as it is."""

    def __init__(self, images):
        self.images, self.comment = images, 'x' * 100

    def __len__(self):
        return len(self.images)

    def get_example(self, i):
        raise AssertionError('no example is read')


class Reopened(Images):
    def __reduce__(self):
        return list, ()


def rows(n, dtype='u1'):
    return np.zeros((n, 1000), dtype)


DATA_SETS = {
    'array': rows(1000),
    'rows of an array': [*rows(1000)],
    'pairs': [(np.zeros(900), i) for i in range(1000)],
    'texts': ['x' * 1000 + str(i) for i in range(1000)],
    'TupleDataset': chainer.datasets.TupleDataset(rows(1000), np.arange(1000)),
    'DictDataset': chainer.datasets.DictDataset(a=rows(1000), b=np.arange(1000)),
    'SubDataset': chainer.datasets.split_dataset(rows(1000), 300)[0],
    'ConcatenatedDataset': chainer.datasets.ConcatenatedDataset(rows(500), [*rows(700)]),
    'TransformDataset': chainer.datasets.TransformDataset(rows(1000), len),
    'own': Images([*rows(1000)]),
}


@pytest.mark.mpi_skip
@pytest.mark.parametrize('dataset', DATA_SETS.values(), ids=DATA_SETS)
def test_estimates_are_near_the_size_of_the_pickle(dataset):
    actual = len(pickle.dumps(dataset if not isinstance(dataset, chainer.datasets.SubDataset)
                              else dataset._dataset[:300]))
    assert .8 * actual < _memory.estimate(dataset) < 1.3 * actual


@pytest.mark.mpi_skip
def test_estimates_without_surprises():
    assert _memory.estimate([rows(1000)] * 5000) < 2 * MB  # pickled once
    assert _memory.estimate(Reopened(rows(1000))) < 1000
    nested = []
    nested.append(nested)
    assert _memory.estimate([nested, nested]) < MB
    assert _memory.estimate([]) == _memory.estimate(()) == 0
    many = Images([[[[{'a': (1, 2)} for _ in range(9)]] * 3 for _ in range(99)] for _ in range(99)])
    assert _memory.estimate(many) < 1000 * MB


comm = communicators('naive', 'version7')


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('is_cut', [True, False])
def test_a_data_set_that_does_not_fit_is_not_sent(comm, monkeypatch, is_cut):
    share = (comm.size - 1) / comm.size if is_cut else comm.size - 1
    dataset = rows(1000 * comm.size) if is_cut else Images(rows(1000))
    root = comm.size - 1
    for free, fits in [(1.1, True), (.9, False)]:
        n_bytes = 1000 * 1000 * (comm.size if is_cut else 1) * share
        monkeypatch.setattr(_memory.NodeMemory, 'here',
                            lambda n=n_bytes * free: _memory.NodeMemory('a', n))
        data = dataset if comm.rank == root else None
        if fits:
            assert len(chainermn.scatter_dataset(data, comm, root=root)) >= 1000 // comm.size
            continue
        with pytest.raises(chainermn.DataSizeError) as caught:
            chainermn.scatter_dataset(data, comm, root=root)
        text = str(caught.value)
        assert f'{n_bytes / 1e9:.3g} GB, but' in text and 'ShardedIterator' in text
        assert len({*comm.allgather_obj(text)}) == 1


@pytest.mark.mpi_skip
def test_nodes():
    def check(*arguments):
        _memory.check(*arguments)
        return True

    a, b, unknown = (_memory.NodeMemory(*each) for each in [('a', 10), ('b', 100), ('c', None)])
    assert check(20, [1., 1.], [a, b], 0)
    assert check(200, [1., 1.], [b, unknown], 0)
    with pytest.raises(chainermn.DataSizeError, match='node a'):
        check(20, [1., 1.], [b, a], 0)
    with pytest.raises(chainermn.DataSizeError):
        check(60, [1., 1., 1.], [b, b, b], 0)
    here = _memory.NodeMemory.here()
    assert here.name and (here.free is None or here.free > MB)
