"""The factory: its results and its errors, on every rank."""

import chainer
import pytest
from chainer import optimizers
from shared_fixtures import communicators, raises_on_all

from chainermn.optimizers import create_multi_node_optimizer

comm = communicators('naive')


@pytest.mark.parametrize('where', ['all ranks', 'last rank'])
def test_a_multi_node_optimizer_of_another_one_raises_on_all_ranks(comm, where):
    other = create_multi_node_optimizer(optimizers.SGD(), comm)
    with raises_on_all(TypeError, match='already a multi-node optimizer'):
        if where == 'all ranks' or comm.rank == comm.size - 1:
            create_multi_node_optimizer(other, comm)
        comm.barrier()


@pytest.mark.parametrize('where', ['all ranks', 'last rank'])
@pytest.mark.parametrize('use', [
    lambda optimizer: optimizer.update(lambda: None),
    lambda optimizer: chainer.training.Trainer(
        chainer.training.StandardUpdater(chainer.iterators.SerialIterator([0], 1), optimizer)),
], ids=['update', 'Trainer'])
def test_without_setup(comm, use, where):
    optimizer = create_multi_node_optimizer(optimizers.SGD(), comm)
    with raises_on_all(RuntimeError, match=r'no model. Call optimizer.setup\(model\)'):
        if where == 'all ranks' or comm.rank == comm.size - 1:
            use(optimizer)
        comm.barrier()


def test_double_buffering_needs_a_communicator_that_overlaps(comm):
    assert not comm._chainermn_channel.can_overlap
    with pytest.raises(ValueError, match='does not support double buffering'):
        create_multi_node_optimizer(optimizers.SGD(), comm, double_buffering=True)


def test_a_compression_as_the_third_argument(comm):
    with raises_on_all(TypeError, match="not 'fp16'. To compress gradients, pass compression='fp"):
        create_multi_node_optimizer(optimizers.SGD(), comm, 'fp16')


def test_double_buffering_on_one_rank_is_an_error_on_all(comm, same_error):
    last = comm.size - 1
    error = same_error(lambda: create_multi_node_optimizer(
        optimizers.SGD(), comm, double_buffering=comm.rank == last).setup(
            chainer.links.Linear(1, 1)).update(), failed=last)
    assert 'does not support double buffering' in str(error)
