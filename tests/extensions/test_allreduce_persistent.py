"""Persistent arrays become their means over the ranks."""
import chainer
import chainer.links as L
import numpy as np
import pytest
from shared_fixtures import communicators

from chainermn.extensions import AllreducePersistent

comm = communicators('naive', 'flat', 'version7')


class Model(chainer.Chain):
    def __init__(self, rank):
        super().__init__()
        with self.init_scope():
            self.layers = chainer.Sequential(L.Linear(2, 3), L.BatchNormalization(3))
            self.bn = L.BatchNormalization((2, 2), dtype=np.float64)
        self.layers[1].avg_mean[...] = rank
        self.layers[1].avg_var[...] = 10 * rank
        self.bn.avg_mean[...] = [[rank, 1], [2, 3 * rank]]
        self.bn.N = 7 + rank
        self.add_persistent('half', np.full(2, rank, np.float16))
        self.add_persistent('counts', np.full(2, rank, np.int64))
        self.add_persistent('label', f'rank {rank}')


def test_means(comm):
    model = Model(comm.rank)
    arrays = model.layers[1].avg_mean, model.bn.avg_mean
    AllreducePersistent(model, comm)()
    mean = (comm.size - 1) / 2
    np.testing.assert_allclose(model.layers[1].avg_mean, [mean] * 3)
    np.testing.assert_allclose(model.layers[1].avg_var, [10 * mean] * 3, rtol=1e-6)
    np.testing.assert_allclose(model.bn.avg_mean, [[mean, 1], [2, 3 * mean]], rtol=1e-12)
    assert model.half.dtype == np.float16 and (model.half == mean).all()
    assert arrays[0] is model.layers[1].avg_mean and arrays[1] is model.bn.avg_mean  # in place
    assert 7 + comm.rank == model.bn.N
    assert (model.counts == comm.rank).all() and model.label == f'rank {comm.rank}'


def test_a_model_without_persistent_arrays(comm):
    AllreducePersistent(L.Linear(2, 2), comm)()


@pytest.mark.compares_calls
@pytest.mark.mpi(min_size=2)
def test_other_shapes_on_one_rank_are_refused_on_all(comm):
    model = L.BatchNormalization(3 if comm.rank else 4)
    with pytest.raises(ValueError, match='shapes differ'):
        AllreducePersistent(model, comm)()


def test_it_runs_before_writers():
    assert AllreducePersistent.trigger == (1, 'epoch')
    assert AllreducePersistent.priority == chainer.training.PRIORITY_WRITER + 1


def test_no_model_on_one_rank(comm):
    model = Model(comm.rank) if comm.rank < comm.size - 1 else None
    with pytest.raises(TypeError, match=r'the model must be a chainer.Link, not .*NoneType'):
        AllreducePersistent(model, comm)()
    comm.barrier()
