"""Overlap on a GPU: the gradients of a step without it, whatever exchanges them."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn
from chainermn.links import create_mnbn_model

pytestmark = pytest.mark.gpu

BUCKET_MB = 4000 / 2**20


def network():
    return chainer.Sequential(
        L.Linear(6, 40), L.BatchNormalization(40), F.tanh, L.Linear(40, 30), F.tanh,
        L.Linear(30, 4))


def batch(rank, n):
    random = np.random.RandomState(10 * n + rank)
    return random.rand(8, 6).astype('f'), random.randint(0, 4, 8).astype('i')


def trained(comm, device, make=network, **options):
    np.random.seed(3 + comm.rank)
    model = L.Classifier(make())
    model.to_device(f'@cupy:{device.id}')
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(.1), comm, **options).setup(model)
    for n in range(7):  # odd, so that the last of two accumulations exchanges
        optimizer.update(model, *(model.xp.asarray(x) for x in batch(comm.rank, n)))
    return optimizer, {path: param.array.get() for path, param in model.namedparams()}


@pytest.mark.parametrize('options', [
    {}, {'compression': 'fp16'}, {'compression': 'bf16'}, {'compression': '2bit'},
    {'n_accumulations': 2}, {'zero_fill': False},
], ids=str)
def test_as_without(comm, device, options):
    _, expected = trained(comm, device, **options)
    optimizer, found = trained(comm, device, overlap='always', bucket_mb=BUCKET_MB, **options)
    for path, array in expected.items():
        np.testing.assert_allclose(found[path], array, rtol=2e-3, atol=1e-4, err_msg=path)
    if comm.size > 1:
        assert optimizer.n_early == len(optimizer.buckets) > 1


def test_on_a_stream_of_the_caller(comm, device):
    """It is non-blocking, so that other streams wait for it only where they are told to."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        _, expected = trained(comm, device)
        _, found = trained(comm, device, overlap='always', bucket_mb=1e-3)
    for path, array in expected.items():
        np.testing.assert_allclose(found[path], array, rtol=2e-3, atol=1e-4, err_msg=path)


class SumOfWeights(chainer.Chain):
    """Both weights have one array as their gradient: Chainer's ``add`` hands it to both."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(6, 40)
            self.a = chainer.Parameter(np.random.standard_normal((4, 40)).astype('f'))
            self.b = chainer.Parameter(np.random.standard_normal((4, 40)).astype('f'))

    def forward(self, x):
        return F.linear(F.tanh(self.first(x)), self.a + self.b)


class BiasOfFullShape(chainer.Chain):
    """The gradient of the parameter is also the one that backward passes on."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(6, 40)
            self.p = chainer.Parameter(np.random.standard_normal((8, 40)).astype('f'))
            self.last = L.Linear(40, 4)

    def forward(self, x):
        return self.last(F.tanh(self.first(x) + self.p))


def shared_layer():
    again = L.Linear(40, 40)
    return chainer.Sequential(L.Linear(6, 40), again, F.tanh, again, F.tanh, L.Linear(40, 4))


@pytest.mark.parametrize('make', [SumOfWeights, BiasOfFullShape, shared_layer, network])
def test_each_parameter_in_a_bucket_of_its_own(comm, device, make):
    """What is exchanged may not change what backward still reads."""
    _, expected = trained(comm, device, make)
    optimizer, found = trained(comm, device, make, overlap='always', bucket_mb=1e-6)
    for path, array in expected.items():
        np.testing.assert_allclose(found[path], array, rtol=1e-4, atol=1e-6, err_msg=path)
    assert all(len(bucket) == 1 for bucket in getattr(optimizer, 'buckets', ()))


@pytest.mark.parametrize('backend', ['auto', 'mpi'], ids='by {}'.format)
def test_multi_node_batch_normalization(comm, device, backend):
    def make(backend='auto'):
        return create_mnbn_model(network(), comm, backend)

    _, expected = trained(comm, device, make)
    _, found = trained(comm, device, lambda: make(backend), overlap='always', bucket_mb=BUCKET_MB)
    for path, array in expected.items():
        np.testing.assert_allclose(found[path], array, rtol=2e-3, atol=1e-4, err_msg=path)


def test_double_buffering_with_multi_node_batch_normalization(device):
    """Gradients of an update are in flight while the next one exchanges statistics."""
    comm = chainermn.create_communicator('pure_nccl')
    results = []
    for backend in ('auto', 'mpi'):
        optimizer, found = trained(
            comm, device, lambda: create_mnbn_model(network(), comm, backend),  # noqa: B023
            double_buffering=True)
        optimizer.wait()
        results.append(found)
    for path, array in results[0].items():
        np.testing.assert_allclose(results[1][path], array, rtol=2e-3, atol=1e-4, err_msg=path)
    comm.finalize()

