"""The programs of PyTorch's tutorial "Writing distributed applications", written for ChainerMN.

They run on the ranks of this test run; what they print there is asserted here.
"""

import math
import random

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn

pytestmark = pytest.mark.every_size


@pytest.fixture(scope='module')
def comm():
    comm = chainermn.create_communicator('naive')
    yield comm
    comm.finalize()


def test_blocking_point_to_point(comm):
    if comm.size == 1:
        return
    data = np.zeros(1)
    if comm.rank == 0:
        data += 1
        comm.send(data, 1, 0)
    elif comm.rank == 1:
        data = comm.recv(0, 0)
    if comm.rank < 2:
        assert data[0] == 1.0  # "Rank 0 has data 1.0", "Rank 1 has data 1.0"


def test_non_blocking_point_to_point(comm):
    if comm.size == 1:
        return
    data, request = np.zeros(1), None
    if comm.rank == 0:
        data += 1
        request = comm.isend(data, 1)
    elif comm.rank == 1:
        request = comm.irecv(0)
    if comm.rank < 2:
        received = request.wait()
        assert (data if comm.rank == 0 else received)[0] == 1.0


def test_all_reduce_in_a_group(comm):
    members = [0, 1][:comm.size]
    group = comm.new_group(members)
    assert (group is None) == (comm.rank not in members)
    if group is not None:
        assert group.allreduce(np.ones(1), op='sum')[0] == len(members)  # "has data 2.0"


@pytest.mark.parametrize('op, combine', [('sum', sum), ('prod', math.prod), ('max', max),
                                         ('min', min)])
def test_operations(comm, op, combine):
    x = np.array([comm.rank + 1., -comm.rank])
    expected = [combine(r + 1. for r in range(comm.size)), combine(-r for r in range(comm.size))]
    np.testing.assert_array_equal(comm.allreduce(x, op), expected)
    reduced = comm.reduce(x, op, root=0)
    if comm.rank == 0:
        np.testing.assert_array_equal(reduced, expected)


def test_the_six_collectives(comm):
    """Its pictures: one number per process."""
    x, ranks = np.array([float(comm.rank)]), np.arange(comm.size, dtype=float)[:, None]
    np.testing.assert_array_equal(comm.scatter(ranks if comm.rank == 0 else None), x)
    gathered = comm.gather(x)
    if comm.rank == 0:
        np.testing.assert_array_equal(gathered, ranks)
    np.testing.assert_array_equal(comm.allgather(x), ranks)
    np.testing.assert_array_equal(comm.bcast(x), [0.])
    np.testing.assert_array_equal(comm.allreduce(x), ranks.sum(0))
    total = comm.reduce(x)
    assert (total is None) == (comm.rank > 0)


class Partition:
    """A part of a data set."""

    def __init__(self, data, index):
        self.data, self.index = data, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        return self.data[self.index[i]]


def partition(data, sizes, part, seed=1234):
    """The part with that number, of parts that have those shares of the data."""
    indexes = list(range(len(data)))
    random.Random(seed).shuffle(indexes)
    lengths = [int(size * len(data)) for size in sizes]
    start = sum(lengths[:part])
    return Partition(data, indexes[start:start + lengths[part]])


def average_gradients(comm, model):
    """What create_multi_node_optimizer does: the mean of each gradient over all processes."""
    for _, param in sorted(model.namedparams()):
        comm.allreduce(param.grad, out=param.grad)
        param.grad /= comm.size


def train(comm, digits, epochs):
    """Distributed synchronous SGD, in batches of 128 over all processes."""
    x, y = digits
    data = list(zip((x / 16).astype('f'), y.astype('i'), strict=True))
    mine = partition(data, [1 / comm.size] * comm.size, comm.rank)
    batch = 128 // comm.size
    np.random.seed(1234)  # the same initial weights on all processes
    model = L.Classifier(chainer.Sequential(L.Linear(64, 50), F.relu, L.Linear(50, 10)))
    optimizer = chainer.optimizers.MomentumSGD(lr=0.05, momentum=0.5).setup(model)
    losses = []
    for _ in range(epochs):
        epoch_loss, n_batches = 0., len(mine) // batch
        for i in range(n_batches):
            examples = [mine[j] for j in range(i * batch, (i + 1) * batch)]
            images, labels = chainer.dataset.concat_examples(examples)
            model.cleargrads()
            loss = model(images, labels)
            epoch_loss += float(loss.array)
            loss.backward()
            average_gradients(comm, model)
            optimizer.update()
        losses.append(epoch_loss / n_batches)
    return model, losses


def test_distributed_sgd(comm, digits):
    """The replicas stay equal, and the loss falls."""
    model, losses = train(comm, digits, 8)
    bits = b''.join(param.array.tobytes() for _, param in sorted(model.namedparams()))
    assert len(set(comm.allgather_obj(bits))) == 1
    losses = comm.multi_node_mean(np.array(losses))
    assert losses[-1] < losses[0] / 2


def test_averaged_gradients_are_those_of_the_whole_batch(comm, digits):
    x, y = digits
    x, y = (x[:24] / 16).astype('f'), y[:24].astype('i')
    model = L.Classifier(L.Linear(64, 10, initialW=np.ones((10, 64), 'f') / 64))
    model.cleargrads()
    model(x, y).backward()
    expected = [param.grad.copy() for _, param in sorted(model.namedparams())]
    model.cleargrads()
    part = slice(comm.rank, None, comm.size)
    model(x[part], y[part]).backward()
    average_gradients(comm, model)
    for (_, param), grad in zip(sorted(model.namedparams()), expected, strict=True):
        np.testing.assert_allclose(param.grad, grad, atol=1e-6)


def allreduce(comm, x):
    """Its own all-reduce: what comes from the left is added, and passed on to the right."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    send, total = x.copy(), x.copy()
    for _ in range(comm.size - 1):
        request = comm.isend(send, right)
        send = comm.irecv(left).wait()
        total += send
        request.wait()
    return total


def test_own_all_reduce(comm):
    x = np.random.RandomState(comm.rank).randint(0, 100, (3, 4)).astype('f')
    np.testing.assert_array_equal(allreduce(comm, x), comm.allreduce(x))


def blocking(comm):
    """The first program, as launch runs it."""
    data = np.zeros(1)
    if comm.rank == 0:
        data += 1
        comm.send(data, 1, 0)
    else:
        data = comm.recv(0, 0)
    return float(data[0])


@pytest.mark.mpi_skip
@pytest.mark.full
def test_its_template_that_starts_the_processes():
    """Without mpiexec, as its run.py does."""
    assert chainermn.launch(blocking, 2) == [1.0, 1.0]
