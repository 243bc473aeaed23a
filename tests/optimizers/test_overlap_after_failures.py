"""Overlap if backward fails on some or all ranks, or at different layers, and training continues.

What such ranks have put on its way meets what others put later, and must not be taken for it: the
bits are those of the same without overlap. If only some ranks fail, and go on with the next update
of that optimizer, all ranks raise there.
"""

import io

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import _backprop_utils

import chainermn

pytestmark = pytest.mark.mpi(min_size=2)


class Fails(chainer.FunctionNode):
    def forward(self, inputs):
        return inputs

    def backward(self, indexes, grads):
        raise ZeroDivisionError


class Net(chainer.Chain):
    """Backward fails below layer ``fails_below``, forward if that is -1."""

    def __init__(self, width):
        super().__init__()
        self.fails_below = None
        with self.init_scope():
            self.layers = chainer.ChainList(*[L.Linear(6, width)] + [
                L.Linear(width, width) for _ in range(3)])

    def forward(self, x):
        if self.fails_below == -1:
            raise ZeroDivisionError
        for n, layer in enumerate(self.layers):
            x = F.tanh(layer(x))
            if n == self.fails_below:
                x = Fails().apply((x,))[0]
        return F.sum(x * x)


class Run:
    """Training with one communicator, and all bits that come of it."""

    def __init__(self, comm, **options):
        self.comm, self.options = comm, options
        self.seen = []
        self.n = 0

    def optimizer(self, width=8, **options):
        np.random.seed(self.comm.rank)
        return chainermn.create_multi_node_optimizer(
            chainer.optimizers.MomentumSGD(0.1), self.comm, **self.options, **options,
        ).setup(Net(width))

    def batch(self):
        self.n += 1
        return np.random.RandomState(10 * self.n + self.comm.rank).rand(5, 6).astype(np.float32)

    def update(self, optimizer, times=1):
        for _ in range(times):
            optimizer.update(optimizer.target, self.batch())
            self.see(optimizer)

    def see(self, optimizer):
        self.seen += [(path, param.array.tobytes(), None if param.grad is None
                       else param.grad.tobytes())
                      for path, param in sorted(optimizer.target.namedparams())]

    def fail(self, optimizer, below):
        optimizer.target.fails_below = below
        with pytest.raises(ZeroDivisionError):
            optimizer.update(optimizer.target, self.batch())
        optimizer.target.fails_below = None

    def raise_if_some_failed(self, optimizer, where):
        """Raise once; after loading, all ranks are in step again."""
        if len(set(self.comm.allgather_obj(where is None))) > 1:
            with pytest.raises(ValueError, match='updates differ between ranks'):
                self.update(optimizer)
            file = io.BytesIO()
            chainer.serializers.save_npz(file, optimizer)
            chainer.serializers.load_npz(io.BytesIO(file.getvalue()), optimizer)

    def after_failure(self, where):
        optimizer = self.optimizer()
        self.update(optimizer, 3)
        if where is not None:
            self.fail(optimizer, where)
        self.n = 10  # the same on all ranks
        return optimizer


def as_call(error):
    """Return the text that the error has without overlap."""
    return str(error).replace('queue_gradients', 'multi_node_mean_grad')


def as_without(comm, train):
    runs = [Run(comm), Run(comm, overlap='always', bucket_mb=200 / 2**20)]
    for run in runs:
        train(run)
    expected, seen = (run.seen for run in runs)
    assert [a[0] for a, b in zip(expected, seen, strict=True) if a != b] == []
    assert _backprop_utils.backprop_step.__module__ == _backprop_utils.__name__


# Below which layer each rank fails; None where it does not.
WHERE = {'the first rank, in forward': lambda rank: None if rank else -1,
         'the first rank': lambda rank: None if rank else 1,
         'the others': lambda rank: 1 if rank else None,
         'all': lambda rank: 1,
         'at different layers': lambda rank: rank % 3}


@pytest.fixture(params=WHERE)
def where(request, comm):
    return WHERE[request.param](comm.rank)


@pytest.mark.sample(2)
def test_update_again(comm, where):
    def train(run):
        optimizer = run.after_failure(where)
        run.raise_if_some_failed(optimizer, where)
        run.update(optimizer, 3)

    as_without(comm, train)


@pytest.mark.sample(2)
def test_another_optimizer(comm, where):
    def train(run):
        first, second = run.optimizer(), run.optimizer(11)
        for _ in range(2):
            run.update(first)
            run.update(second)
        for _ in range(2):
            if where is not None:
                run.fail(first, where)
            run.n += 10 - run.n % 10
            run.update(second, 2)
        run.raise_if_some_failed(first, where)
        run.update(first, 2)

    as_without(comm, train)


def test_parameters_that_differ(comm):
    """Refused as without overlap, not exchanged; and then training continues."""
    def train(run):
        optimizer = run.optimizer(width := 8)
        run.update(optimizer, 3)
        layers = optimizer.target.layers
        kept = layers[2].W.array, layers[2].b.array, layers[3].W.array
        if comm.rank == 1:
            layers[2].W.array, layers[2].b.array, layers[3].W.array = (
                np.ones(shape, np.float32) for shape in ((900, width), (900,), (width, 900)))
        with pytest.raises(ValueError, match='parameters differ between ranks') as info:
            run.update(optimizer)
        run.seen.append((as_call(info.value),))
        layers[2].W.array, layers[2].b.array, layers[3].W.array = kept
        optimizer.target.cleargrads()
        run.update(optimizer, 2)

    as_without(comm, train)
