"""AllreducePersistent: errors, and when it runs; the laws of extensions test its means."""
import chainer
import chainer.links as L
import pytest
from shared_fixtures import communicators

from chainermn.extensions import AllreducePersistent

comm = communicators('naive', 'flat', 'version7')


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
    model = L.BatchNormalization(3) if comm.rank < comm.size - 1 else None
    with pytest.raises(TypeError, match=r'the model must be a chainer.Link, not .*NoneType'):
        AllreducePersistent(model, comm)()
    comm.barrier()
