"""Training gives the same bits, however busy the memory pool is.

In the second run NaNs overwrite any memory that the pool gets back too early.
"""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn
from chainermn.links import create_mnbn_model

pytestmark = [pytest.mark.gpu, pytest.mark.limit(300)]

BUCKET_MB = 4000 / 2**20
OPTIONS = [
    {}, {'overlap': 'always', 'bucket_mb': BUCKET_MB}, {'overlap': 'always', 'bucket_mb': 1e-6},
    {'double_buffering': True}, {'compression': '2bit'},
    {'overlap': 'always', 'bucket_mb': BUCKET_MB, 'compression': 'fp16'},
]


def network():
    return chainer.Sequential(
        L.Linear(6, 40), L.BatchNormalization(40), F.tanh, L.Linear(40, 30), F.tanh,
        L.Linear(30, 4))


class Overwriter:
    """Takes memory of random sizes from the pool, fills it with NaN, and gives most of it back."""

    def __init__(self):
        self.random = np.random.RandomState(0)
        self.kept = []

    def __call__(self):
        import cupy

        for _ in range(10):
            self.kept.append(cupy.full(self.random.randint(1, 3000), np.nan, 'f'))
        self.random.shuffle(self.kept)
        del self.kept[5:]


def synchronize():
    import cupy

    cupy.cuda.Device().synchronize()


def trained(device, between, n_updates, options):
    comm = chainermn.create_communicator('pure_nccl')
    np.random.seed(3)
    model = L.Classifier(create_mnbn_model(network(), comm))
    model.to_device(f'@cupy:{device.id}')
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(.05), comm, **options).setup(model)
    random = np.random.RandomState(comm.rank)
    for _ in range(n_updates):
        x = model.xp.asarray(random.rand(8, 6).astype('f'))
        t = model.xp.asarray(random.randint(0, 4, 8).astype('i'))

        def loss(x=x, t=t):
            result = model(x, t)
            between()
            return result

        optimizer.update(loss)
        between()
    if 'double_buffering' in options:
        optimizer.wait()
    results = {path: param.array.get() for path, param in model.namedparams()}
    comm.finalize()
    return results


@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_the_same_bits(device, is_virtual, options):
    n_updates = 10 if is_virtual else 200
    expected = trained(device, synchronize, n_updates, options)
    found = trained(device, Overwriter(), n_updates, options)
    for path, array in expected.items():
        assert np.isfinite(array).all()
        np.testing.assert_array_equal(found[path], array, err_msg=path)
