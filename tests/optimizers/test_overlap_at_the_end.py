"""Programs that end while gradients are in flight: they exit, with or without an error."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn

pytestmark = pytest.mark.mpi_skip


def trained(comm, loss_of):
    np.random.seed(comm.rank)
    model = chainer.Sequential(L.Linear(5, 30), F.tanh, L.Linear(30, 30), F.tanh, L.Linear(30, 1))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(.1), comm, overlap='always', bucket_mb=1e-3).setup(model)
    for n in range(4):
        optimizer.update(lambda n=n: loss_of(model(np.ones((3, 5), 'f')), n))
    return optimizer


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize('name', ['flat', 'naive'])
def test_a_rank_raises_while_the_others_have_begun(name):
    def run(comm):
        def loss_of(y, n):
            if n == 3 and comm.rank == 1:
                raise ZeroDivisionError('in the loss')
            return F.mean(y)

        trained(comm, loss_of)

    with pytest.raises(ZeroDivisionError, match=r'in the loss .rank 1 of 3'):
        chainermn.launch(run, 3, communicator_name=name)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize('name', ['flat', 'naive'])
def test_all_end_with_more_and_less_in_the_queue(name):
    def run(comm):
        class Fails(chainer.FunctionNode):
            def forward(self, inputs):
                return inputs

            def backward(self, indexes, grads):
                raise ZeroDivisionError

        def loss_of(y, n):
            if n == 3:
                if comm.rank == 1:
                    raise ZeroDivisionError
                return F.mean(y) if comm.rank == 0 else F.mean(Fails().apply((y,))[0])
            return F.mean(y)

        if comm.rank == 0:
            # It meets the end of the others, with all its gradients on their way.
            with pytest.raises(Exception, match='end of the script'):
                trained(comm, loss_of)
        else:
            with pytest.raises(ZeroDivisionError):
                trained(comm, loss_of)
        return comm.rank

    assert chainermn.launch(run, 3, communicator_name=name) == [0, 1, 2]
