"""chainermn.functions and MultiNodeChainList on GPU arrays: the same values as on host arrays."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
import chainermn.functions as mnf
from chainermn.links import MultiNodeChainList, create_multi_node_n_step_rnn

pytestmark = pytest.mark.gpu

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
TOLERANCE = {'float16': 2e-2, 'float32': 1e-5}

FUNCTIONS = {
    'allgather': lambda comm, xs: mnf.allgather(comm, xs[0]),
    'allreduce': lambda comm, xs: mnf.allreduce(comm, xs[0]),
    'alltoall': lambda comm, xs: mnf.alltoall(comm, xs),
    'reduce_scatter': lambda comm, xs: mnf.reduce_scatter(comm, xs),
    'bcast': lambda comm, xs: mnf.bcast(comm, xs[0], SIZE - 1),
    'gather': lambda comm, xs: mnf.gather(comm, xs[0], SIZE - 1),
    'scatter': lambda comm, xs: mnf.scatter(comm, xs, SIZE - 1),
    'send and recv': lambda comm, xs: ring(comm, xs[0]),
}


def ring(comm, x):
    """Send to the next rank; return the array of the rank before."""
    if SIZE == 1:
        pytest.skip('needs two ranks')
    if RANK == 0:
        sent = mnf.send(F.tanh(x), comm, 1)
        return mnf.recv(comm, SIZE - 1, delegate_variable=sent)
    y = mnf.recv(comm, RANK - 1)
    sent = mnf.send(F.tanh(x), comm, (RANK + 1) % SIZE)
    return mnf.pseudo_connect(sent, y)


@pytest.fixture
def comm(name):
    comm = chainermn.create_communicator(name)
    yield comm
    comm.finalize()


def values_and_gradients(comm, function, xs):
    xs = [chainer.Variable(x) for x in xs]
    ys = FUNCTIONS[function](comm, xs)
    ys = list(ys) if isinstance(ys, tuple) else [ys]
    if ys[0].size:
        loss = sum(F.sum(y * y) * (1 + RANK + 10 * i) for i, y in enumerate(ys))
    else:
        loss, = ys  # of a rank without a result
    loss.backward()
    return [*(y.array for y in ys), *(x.grad for x in xs)]


@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('function', FUNCTIONS)
def test_as_on_the_host(comm, name, function, dtype):
    import cupy

    host = chainermn.create_communicator('naive')
    random = np.random.RandomState(RANK)
    xs = [random.uniform(-1, 1, (2, 3)).astype(dtype) for _ in range(SIZE)]
    expected = values_and_gradients(host, function, xs)
    found = values_and_gradients(comm, function, [cupy.asarray(x) for x in xs])
    for y, z in zip(found, expected, strict=True):
        assert (y is None) == (z is None)
        if z is not None and z.size:
            assert type(y) is cupy.ndarray and y.dtype == dtype
            np.testing.assert_allclose(y.get(), z, TOLERANCE[dtype], TOLERANCE[dtype])
    host.finalize()


class Part(chainer.Chain):
    """A layer whose weights depend on a seed."""

    def __init__(self, seed):
        super().__init__()
        weights = np.random.RandomState(seed).normal(0, 1, (4, 4)).astype('f')
        with self.init_scope():
            self.layer = L.Linear(4, 4, initialW=weights)

    def forward(self, x):
        return F.tanh(self.layer(x))


def test_a_model_over_all_ranks(comm, device):
    """Also with one optimizer on each rank, for three updates."""
    import cupy

    x = np.random.RandomState(9).normal(0, 1, (3, 4)).astype('f')
    one = chainer.Sequential(*map(Part, range(SIZE)))
    model = MultiNodeChainList(comm)
    model.add_link(Part(RANK), rank_in=RANK - 1 if RANK > 0 else None,
                   rank_out=RANK + 1 if RANK < SIZE - 1 else None)
    model.to_device(f'@cupy:{device.id}')
    rules = [chainer.optimizers.SGD(.1).setup(link) for link in (one, model)]

    def loss(link, *xs):
        y = link(*xs)
        return F.sum(y * y) if y.size else y

    for _ in range(3):
        rules[0].update(loss, one, x)
        rules[1].update(loss, model, *([cupy.asarray(x)] if RANK == 0 else []))
    for name in 'W', 'b':
        np.testing.assert_allclose(
            getattr(model[0].layer, name).array.get(), getattr(one[RANK].layer, name).array,
            rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize('kind', [L.NStepGRU, L.NStepLSTM], ids=lambda kind: kind.__name__)
def test_recurrent_layers_over_all_ranks(comm, device, kind):
    """Each rank has one layer, and sends its final states to the next rank."""
    import cupy

    host = chainermn.create_communicator('naive')
    xs = [np.random.RandomState(n).normal(0, 1, (n, 4)).astype('f') for n in (3, 2, 1)]
    results = []
    for target, to_device in (host, np.asarray), (comm, cupy.asarray):
        np.random.seed(RANK)
        rnn = create_multi_node_n_step_rnn(
            kind(1, 4, 4, 0.), target, RANK - 1 if RANK > 0 else None,
            RANK + 1 if RANK < SIZE - 1 else None)
        if target is comm:
            rnn.to_device(f'@cupy:{device.id}')
        rnn.cleargrads()
        *_, ys, delegate = rnn([to_device(x) for x in xs])
        loss = sum(F.sum(y * y) for y in ys)
        if delegate is not None:
            loss, = mnf.pseudo_connect(delegate, loss)
        loss.backward()
        params = [param for _, param in sorted(rnn.namedparams())]
        results.append([*(y.array for y in ys), *(param.grad for param in params)])
    for expected, found in zip(*results, strict=True):
        assert type(found) is cupy.ndarray
        np.testing.assert_allclose(found.get(), expected, rtol=1e-3, atol=1e-5)
    host.finalize()
