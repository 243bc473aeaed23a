"""Each differentiable collective against the graph of all ranks built in one process."""
import chainer
import chainer.functions as F
import numpy as np
import pytest
from shared_fixtures import communicators

import chainermn.functions as mnf
from chainermn.functions import collective_communication

pytestmark = pytest.mark.every_size

comm = communicators('naive', 'flat', 'version7')


def array_of(rank, number, dtype, rows=2):
    """The input ``number`` of a rank, known to all ranks."""
    rng = np.random.RandomState(100 * rank + number)
    return rng.uniform(-1, 1, (rows, 3)).astype(dtype)


# What each rank would get, from the inputs of all ranks: the definition of each function.
DEFINITIONS = {
    'allgather': lambda xs, root: [[x for x, in xs] for _ in xs],
    'allreduce': lambda xs, root: [[sum(x for x, in xs)] for _ in xs],
    'alltoall': lambda xs, root: [[x[rank] for x in xs] for rank in range(len(xs))],
    'reduce_scatter': lambda xs, root: [[sum(x[rank] for x in xs)] for rank in range(len(xs))],
    'bcast': lambda xs, root: [[xs[root][0]] for _ in xs],
    'gather': lambda xs, root: [[x for x, in xs] if rank == root else []
                                for rank in range(len(xs))],
    'scatter': lambda xs, root: [[xs[root][rank]] for rank in range(len(xs))],
}
TAKES_ONE_PER_RANK = ('alltoall', 'reduce_scatter', 'scatter')
HAS_ROOT = ('bcast', 'gather', 'scatter')


def call(comm, name, xs, root):
    function = getattr(mnf, name)
    x = xs if name in TAKES_ONE_PER_RANK else xs[0]
    y = function(comm, x, root) if name in HAS_ROOT else function(comm, x)
    return list(y) if isinstance(y, tuple) else [y]


@pytest.mark.parametrize('name', ['allgather', 'gather'])
def test_shapes_may_differ(comm, name):
    x = chainer.Variable(array_of(comm.rank, 0, np.float32, rows=comm.rank))
    ys = call(comm, name, [x], 0)
    if name == 'allgather' or comm.rank == 0:
        assert [y.shape for y in ys] == [(rank, 3) for rank in range(comm.size)]
        sum(F.sum(y) for y in ys).backward()
    else:
        ys[0].backward()
    assert (x.grad == (comm.size if name == 'allgather' else 1)).all()


@pytest.mark.parametrize('name', ['allreduce', 'allgather', 'alltoall', 'reduce_scatter'])
def test_double_backprop(comm, name):
    """The gradient of a penalty on the gradient, against one process."""
    count = comm.size if name in TAKES_ONE_PER_RANK else 1

    def penalty(ys, xs):
        grads = chainer.grad([sum(F.sum(y * y * y) for y in ys)], xs, enable_double_backprop=True)
        return sum(F.sum(g * g) for g in grads)

    everything = [[chainer.Variable(array_of(rank, i, np.float64)) for i in range(count)]
                  for rank in range(comm.size)]
    outputs = DEFINITIONS[name](everything, 0)
    penalty([y for ys in outputs for y in ys], [x for xs in everything for x in xs]).backward()

    xs = [chainer.Variable(array_of(comm.rank, i, np.float64)) for i in range(count)]
    penalty(call(comm, name, xs, 0), xs).backward()
    for x, wanted in zip(xs, everything[comm.rank], strict=True):
        np.testing.assert_allclose(x.grad, wanted.grad, rtol=1e-10)


def test_float16_gradients_are_summed_in_float32(comm):
    x = chainer.Variable(np.full(1, 1, np.float16))
    y = mnf.bcast(comm, x, 0)
    # 2048 + 1 + 1 is 2048 if each sum is rounded to float16, and 2050 if only the last is.
    y.grad = np.full(1, 2048 if comm.rank == 0 else 1, np.float16)
    y.backward()
    if comm.rank == 0:
        assert x.grad[0] == np.float16(2048 + comm.size - 1)


@pytest.mark.parametrize('name', ['alltoall', 'scatter'])
def test_the_rows_of_one_variable(comm, name):
    x = chainer.Variable(np.arange(2.0 * comm.size).reshape(-1, 2))
    ys = call(comm, name, x, 0)
    assert all(y.shape == (2,) for y in ys)
    sum(F.sum(y) for y in ys).backward()
    if name == 'alltoall' or comm.rank == 0:
        assert (x.grad == 1).all()


def test_nodes_can_be_called(comm):
    ys = collective_communication.AllGather(comm)(np.full(1, comm.rank, np.float32))
    ys = ys if comm.size > 1 else (ys,)
    assert [float(y.array[0]) for y in ys] == list(range(comm.size))
    inputs = (np.ones(1, np.float32),) if comm.rank == 0 else ()
    assert collective_communication.Bcast(comm, 0)(*inputs).array == 1

