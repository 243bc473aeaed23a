"""Optimizers whose gradients are compressed: training, equal ranks, and what is saved."""

import threading

import chainer
import numpy as np
import pytest
from chainer import functions as F
from chainer import links as L
from chainer import optimizers
from shared_fixtures import raises_on_all

import chainermn
from chainermn._collectives import models
from chainermn.communicators import compression


def make(comm, kind, actual=None, model=None):
    model = L.Linear(6, 4) if model is None else model
    optimizer = chainermn.create_multi_node_optimizer(
        actual or optimizers.SGD(0.1), comm, compression=kind).setup(model)
    return optimizer, model


def batch(seed):
    random = np.random.RandomState(seed)
    return random.normal(size=(5, 6)).astype('f'), random.normal(size=(5, 4)).astype('f')


def train(comm, optimizer, steps):
    for step in steps:
        optimizer.update(lambda x, t: F.mean_squared_error(optimizer.target(x), t),
                         *batch(100 * step + comm.rank))


def test_hint_on_a_single_host_is_printed_once(comm, capfd):
    models._print_once.cache_clear()
    optimizer, _ = make(comm, 'fp16')
    train(comm, optimizer, range(3))
    printed = capfd.readouterr().err.count('compression slows down communication within a')
    assert printed == (comm.rank == 0 and comm.size > 1)


def test_what_another_rank_saved_is_not_taken_over(comm, tmp_path):
    optimizer, _ = make(comm, '2bit')
    train(comm, optimizer, range(4))
    chainer.serializers.save_npz(tmp_path / 'optimizer.npz', optimizer)
    folder = comm.bcast_obj(tmp_path)
    before = list(optimizer.compression.residuals.values())
    assert any(residual.any() for residual in before)
    resumed, _ = make(comm, '2bit')
    chainer.serializers.load_npz(folder / 'optimizer.npz', resumed)
    comm.barrier()
    if comm.rank:
        assert not resumed.compression.residuals
    else:
        for theirs, residual in zip(resumed.compression.residuals.values(), before, strict=True):
            np.testing.assert_array_equal(theirs, residual)


@pytest.mark.parametrize('saved, loaded', [
    (None, '2bit'), ('2bit', 'fp16'), ('fp16', 'powersgd'), ('powersgd', None),
    ('2bit', 'powersgd')])
def test_compression_may_change_between_runs(comm, tmp_path, saved, loaded):
    optimizer, _ = make(comm, saved)
    train(comm, optimizer, range(3))
    chainer.serializers.save_npz(tmp_path / 'optimizer.npz', optimizer)
    resumed, _ = make(comm, loaded)
    chainer.serializers.load_npz(tmp_path / 'optimizer.npz', resumed)
    assert resumed.t == 2
    train(comm, resumed, range(3))


def test_another_model_begins_anew(comm):
    optimizer, _ = make(comm, '2bit')
    train(comm, optimizer, range(3))
    assert optimizer.compression.residuals
    optimizer.setup(L.Linear(6, 4))
    assert not optimizer.compression.residuals


class Feedback:
    """A user's compressor with error feedback."""

    def __init__(self):
        self.errors = {}

    def compress(self, x, key=None):
        x = x + self.errors.get(key, 0)
        encoded = np.round(x).astype('i2')
        self.errors[key] = x - encoded
        return encoded

    def decompress(self, encoded, size, dtype):
        return encoded.astype(dtype)

    def reset(self):
        self.errors.clear()

    def serialize(self, serializer):
        path, (error,) = 'error', self.errors.values()
        self.errors = {key: serializer(path, error) for key in self.errors}


def test_an_optimizer_keeps_the_compressor_that_no_other_one_uses(comm):
    own = compression.TwoBit(2)
    first, _ = make(comm, own)
    second, _ = make(comm, own)
    assert first.compression is own
    assert second.compression is not own
    assert second.compression.threshold == 2
    plain = compression.Fp16()  # without state
    assert [make(comm, plain)[0].compression for _ in range(2)] == [plain] * 2


def test_a_compressor_that_cannot_be_copied_is_an_error_on_all_ranks(comm):
    own = Feedback()
    own.lock = threading.Lock() if comm.rank == comm.size - 1 else None
    first, _ = make(comm, own)
    with raises_on_all(ValueError, match='Create a separate compressor for each'):
        make(comm, own)[0].update()
    del first


@pytest.mark.filterwarnings('error')
def test_clipping_of_gradients_that_were_not_sent_yet(comm):
    """All mean gradients are zero."""
    optimizer, model = make(comm, {'type': '2bit', 'threshold': 100})
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(.1))
    before = model.W.array.copy()
    train(comm, optimizer, [1])
    before[...] = model.W.array  # that of rank 0
    train(comm, optimizer, [2, 3])
    np.testing.assert_array_equal(model.W.array, before)
    assert optimizer.t == 2


@pytest.mark.parametrize('bad, kind, message', [
    ('4bit', ValueError, 'unknown compression type'),
    ({'type': '2bit', 'threshold': -1}, ValueError, 'threshold must be a positive number'),
    (7, TypeError, 'compression must be'),
])
def test_an_invalid_compression_raises_on_all_ranks(comm, bad, kind, message):
    model = L.Linear(2, 2)
    with raises_on_all(kind, match=message):
        make(comm, bad if comm.rank == comm.size - 1 else None, model=model)[0].update()


@pytest.mark.mpi(min_size=2)
def test_compressions_that_differ_are_noticed(comm):
    optimizer, _ = make(comm, {'type': '2bit', 'threshold': 1 + comm.rank})
    with raises_on_all(ValueError, match=r'compression: 2bit threshold=1\.0 on rank 0; '):
        train(comm, optimizer, range(2))
