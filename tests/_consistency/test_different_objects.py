"""Ranks that use different optimizers or pipelines, or that may do so."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn


@pytest.fixture
def comm():
    comm = chainermn.create_communicator('naive')
    yield comm
    comm.finalize()


class Model(chainer.Chain):
    """One parameter, with the gradient ``factor``."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        with self.init_scope():
            self.w = chainer.Parameter(np.zeros(1, 'f'))

    def forward(self):
        return F.sum(self.w) * self.factor


def create(comm, model, **options):
    return chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(1), comm, **options).setup(model)


def update(optimizer):
    for _ in range(2):  # the first update copies
        optimizer.update(optimizer.target)
    return optimizer.target.w.array.item()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('is_function', [False, True])
def test_optimizers_in_different_orders(comm, is_function, same_error):
    if is_function:
        a = create(comm, Model(1))
        b = create(comm, Model(2))
    else:
        a = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(1), comm).setup(Model(1))
        b = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(1), comm).setup(Model(2))
    first = a if comm.rank else b
    error = same_error(first.update, first.target)
    assert isinstance(error, chainermn.CollectiveMismatchError)
    assert str(error).startswith(
        'Collective mismatch in the multi-node optimizer (bcast_data): ranks use objects that were '
        'created on different lines (no data was sent)\n  rank 0: the multi-node optimizer created '
        'at test_different_objects.py:')
    assert 'Use the objects in the same order on all ranks' in str(error)


@pytest.mark.parametrize('lines', ['same', 'different', 'more on rank 0'])
def test_a_correct_order(comm, lines):
    if lines == 'different' and comm.rank == 0:
        a = create(comm, Model(1))
        b = create(comm, Model(2))
    elif lines == 'different':
        b = create(comm, Model(2))
        a = create(comm, Model(1))
    else:
        if lines != 'same' and comm.rank == 0:
            create(comm, Model(3))
        a = create(comm, Model(1))
        b = create(comm, Model(2))
    for _ in range(2):
        w = update(a), update(b)
    assert w == (-3, -6)


@pytest.mark.parametrize('is_compared', [True, False])
def test_optimizers_that_are_created_on_one_line(comm, is_compared, recwarn):
    """Nothing shows which of them a rank means; nor with ``compare_settings=False``."""
    if is_compared:
        a, b = [create(comm, Model(1)) for _ in range(2)]
    else:
        a = create(comm, Model(1), compare_settings=False)
        b = create(comm, Model(1), compare_settings=False)
    assert update(a if comm.rank else b) == -1
    assert not recwarn.list


@pytest.mark.mpi(min_size=2)
def test_pipelines_in_different_orders(comm, same_error):
    def create():
        model = chainermn.MultiNodeChainList(comm)
        last = comm.size - 1
        model.add_link(L.Linear(1, 1), rank_in=comm.rank - 1 if comm.rank else None,
                       rank_out=comm.rank + 1 if comm.rank < last else None)
        return chainermn.Pipeline(model, F.mean_squared_error, 1)

    a = create()
    b = create()
    x = np.ones((2, 1), 'f')
    error = same_error(a if comm.rank else b, x, x)
    assert 'Pipeline created at test_different_objects.py:' in str(error)
