"""Pipelines on a GPU: the gradients of one process with accumulation, equal in every bit."""

import os

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn
from chainermn import Pipeline
from chainermn.links import MultiNodeChainList
from chainermn.links._pipeline.transfers import Transfers

pytestmark = pytest.mark.gpu

WIDTH, MICRO_BATCHES = 6, 5


class Part(chainer.Chain):
    """Keeps a device busy for a while, so that the host is ahead of it."""

    def __init__(self, rank, is_last, side):
        super().__init__()
        random = np.random.RandomState(rank)
        self.is_last = is_last
        with self.init_scope():
            for name, n, m in ('fc', WIDTH, WIDTH), ('wide', WIDTH, side), ('narrow', side, WIDTH):
                setattr(self, name, L.Linear(n, m, initialW=random.randn(m, n) / n ** .5))
        self.add_persistent('matrix', (random.randn(side, side) / side ** .5).astype('f'))

    def forward(self, *xs):
        if isinstance(xs[0], tuple):
            xs, = xs
        y = F.tanh(self.fc(xs[0] * xs[-1]))
        z = self.wide(y)
        for _ in range(4):
            z = F.tanh(F.linear(z, self.matrix))
        z = self.narrow(z)
        return z if self.is_last else (y, z)  # sums of two gradients, in any order


def batch(xp, step):
    random = np.random.RandomState(step)
    return (xp.asarray(random.randn(4 * MICRO_BATCHES, WIDTH).astype('f')),
            xp.asarray(random.randint(0, WIDTH, 4 * MICRO_BATCHES).astype('i')))


def build(comm, device, side):
    """Return the list of this rank, and the whole model in one process."""
    def part(rank):
        return Part(rank, rank == comm.size - 1, side)

    model = MultiNodeChainList(comm)
    model.add_link(part(comm.rank), comm.rank - 1 if comm.rank > 0 else None,
                   comm.rank + 1 if comm.rank < comm.size - 1 else None)
    one = chainer.Sequential(*map(part, range(comm.size)))
    for each in model, one:
        each.to_device(f'@cupy:{device.id}')
    return model, one


def accumulate(model, x, t):
    """Compute the gradients of micro-batches in one process."""
    model.cleargrads()
    for xs, ts in zip(x.reshape(MICRO_BATCHES, 4, WIDTH), t.reshape(MICRO_BATCHES, 4), strict=True):
        loss = F.softmax_cross_entropy(model(xs), ts)
        loss.grad = loss.xp.array(1 / MICRO_BATCHES, 'f')
        loss.backward()


def check_updates(comm, device, side, **options):
    """Take three steps, so that memory is used again."""
    model, one = build(comm, device, side)
    optimizer, expected = (chainer.optimizers.SGD(.1).setup(each) for each in (model, one))
    pipeline = Pipeline(model, F.softmax_cross_entropy, MICRO_BATCHES, **options)
    losses = []
    for step in range(3):
        x, t = batch(model.xp, step)
        optimizer.update(pipeline, x, t)
        accumulate(one, x, t)
        expected.update()
        with chainer.no_backprop_mode():
            losses += [(pipeline(x, t).array, F.softmax_cross_entropy(one(x), t).array)]
    params = dict(one[comm.rank].namedparams())
    for path, param in model[0].namedparams():
        np.testing.assert_array_equal(param.array.get(), params[path].array.get(), path)
    for ours, theirs in losses:
        np.testing.assert_allclose(ours.get(), theirs.get(), rtol=1e-5)


@pytest.mark.sample(4)
@pytest.mark.parametrize('options', [
    {}, {'schedule': 'gpipe'}, {'recompute': True}], ids=str)
def test_updates(comm, device, side, options):
    check_updates(comm, device, side, **options)


@pytest.mark.sample(2)
def test_on_a_stream_of_the_caller(comm, device, side):
    """It is non-blocking, so that other streams wait for it only where they are told to."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        check_updates(comm, device, side)


@pytest.mark.sample(2)
def test_an_operation_in_a_stage(comm, device, side):
    """Rank 0 waits in forward of micro-batch k + 1 for rank 1, which waits for micro-batch k."""
    model, _ = build(comm, device, side)
    other = chainermn.create_communicator('naive')
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    seen = []

    class Waits(Part):
        def forward(self, x):
            seen.append(None)
            if (first and len(seen) > 1) or (last and len(seen) < MICRO_BATCHES):
                pair.barrier()
            return super().forward(x)

    if comm.size > 1:
        pair = other.split(int(first or last), comm.rank)
        model[0].__class__ = Waits
        model.cleargrads()
        Pipeline(model, F.softmax_cross_entropy, MICRO_BATCHES)(*batch(model.xp, 0)).backward()
        assert len(seen) == MICRO_BATCHES
        pair.finalize()
    other.finalize()


def test_a_transfer_does_not_wait_for_the_computation(device, is_virtual):
    """Work that is queued later does not run before, on a device that runs nothing by itself."""
    import cupy

    if not is_virtual or os.environ['VGPU_MODE'] != 'lazy':
        pytest.skip('needs the virtual GPU in lazy mode')
    transfers = Transfers()
    (x,), computed = transfers.to_send([cupy.arange(5)])
    while not transfers.is_reached(computed):
        pass
    y = cupy.zeros(5)
    for _ in range(10):
        y += 1
    later = cupy.cuda.get_current_stream().record()
    with transfers.on_stream():
        np.testing.assert_array_equal(x.get(), np.arange(5))
    assert not transfers.is_reached(later)


@pytest.mark.sample(2)
def test_recomputation_draws_random_numbers_again(comm, device, side):
    """Those of CuPy."""
    if comm.size == 1:
        pytest.skip('the last stage is not computed again')
    import cupy

    drawn = []

    class WithDropout(Part):
        def forward(self, x):
            drawn.append(F.dropout(self.xp.ones(1000, 'f')).array)
            return super().forward(x)

    model, _ = build(comm, device, side)
    model[0].__class__ = WithDropout
    cupy.random.seed(comm.rank)
    model.cleargrads()
    Pipeline(model, F.softmax_cross_entropy, 3, 'gpipe', recompute=True)(
        *batch(model.xp, 0)).backward()
    found = [x.get() for x in drawn]
    if comm.rank < comm.size - 1:
        assert len(found) == 6
        for k in range(3):
            np.testing.assert_array_equal(found[k], found[3 + k])
    assert len({x.tobytes() for x in found}) == 3
