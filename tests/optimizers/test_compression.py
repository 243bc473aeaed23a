"""Optimizers whose gradients are compressed: training, equal ranks, and what is saved."""

import threading

import chainer
import numpy as np
import pytest
from chainer import functions as F
from chainer import links as L
from chainer import optimizers
from each_case import each_case
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
    printed = capfd.readouterr().err.count('compression makes exchanges slower on a single host')
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


def test_each_optimizer_has_its_own(comm):
    one, _ = make(comm, '2bit')
    other, _ = make(comm, '2bit')
    assert one.compression is not other.compression
    own = compression.TwoBit(2)
    assert make(comm, own)[0].compression is own


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


@pytest.mark.parametrize('create', [
    lambda: compression.TwoBit(.3), lambda: compression.PowerSGD(1, 1), Feedback])
def test_two_optimizers_with_one_compressor(comm, create, tmp_path):
    """As in a GAN: each trains as with a compressor of its own, also after loading."""
    results = []
    for is_shared in False, True:
        one = create()
        both = []
        for shape in (4, 6), (4, 6):
            link = chainer.Link()
            with link.init_scope():
                link.w = chainer.Parameter(np.zeros(shape, 'f'))
            both.append(make(comm, one if is_shared else create(), optimizers.SGD(1), link)[0])
        random = np.random.RandomState(comm.rank)
        for step in range(6):
            for sign, optimizer in zip((1, -1), both, strict=True):
                if step == 4:  # save one, and go on as if the other had stopped
                    file = tmp_path / f'{is_shared}{sign}.npz'
                    chainer.serializers.save_npz(file, optimizer)
                    chainer.serializers.load_npz(file, optimizer)
                w = optimizer.target.w
                w.grad = (sign * random.rand(*w.shape)).astype('f')
                optimizer.update()
        results.append([optimizer.target.w.array for optimizer in both])
        assert all(array.any() for array in results[-1])
    for own, shared in zip(*results, strict=True):
        np.testing.assert_array_equal(own, shared)


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


class Weights(chainer.Link):
    """Its loss is linear, so the gradients are known."""

    def __init__(self, dtype):
        super().__init__()
        with self.init_scope():
            for name in 'ab':
                setattr(self, name, chainer.Parameter(np.zeros((8, 6), dtype)))


def gradient(rank, step, name):
    """Return numbers that are exact in float16, with a loss scale, too."""
    return np.random.RandomState([rank, step, ord(name)]).randint(-32, 32, (8, 6)) / 32


@pytest.mark.filterwarnings('ignore:Non finite number:UserWarning')
@each_case('kind, case', [(kind, case) for kind in ('2bit', {'type': 'powersgd', 'rank': 1})
                          for case in (
    dict(scales=[16., 4., 1.], n_accumulations=2, overlap='always', resumes=True),
    dict(scales=[8., 2., 4.], names=['ab', 'a', 'b']),
    dict(infinite=4, shard_states=True))])
def test_all_gradients_are_sent(comm, kind, case):
    """The weights are minus the sum of the mean gradients, but for what is left to be sent.

    So the loss scale may change, parameters may be left out, and skipped steps send nothing.
    """
    case = dict(case)
    scales, dtype = case.pop('scales', None), case.pop('dtype', 'f')
    names, infinite = case.pop('names', ['ab']), case.pop('infinite', None)
    resumes, n = case.pop('resumes', False), case.get('n_accumulations', 1)

    def create():
        sgd = optimizers.SGD(1)
        if scales is None:
            sgd.loss_scaling(interval=3)
            sgd._loss_scale = 32.
        return chainermn.create_multi_node_optimizer(
            sgd, comm, compression=kind, zero_fill=len(names) == 1, **case).setup(Weights(dtype))

    def total(step, name):
        return sum(gradient(rank, step, name) for rank in range(comm.size)) / comm.size

    optimizer, expected = create(), dict.fromkeys('ab', 0)
    for step in range(9):
        model, used = optimizer.target, names[step % len(names)] if step else 'ab'
        if scales is not None:
            optimizer.loss_scaling(scale=scales[step % 3])
        mine = {name: gradient(comm.rank, step, name).astype(dtype) for name in used}
        if step == infinite and comm.rank == comm.size - 1:
            mine['a'][1, 2] = np.inf
        with np.errstate(invalid='ignore'):  # zero times infinity
            optimizer.update(lambda model, mine: sum(
                F.sum(getattr(model, name) * x) for name, x in mine.items()), model, mine)
        if step and infinite not in range(step - (step - 1) % n, step - (step - 1) % n + n):
            for name in used:
                expected[name] -= total(step, name) / n
        if step == 5 and resumes:
            state = [chainer.serializers.DictionarySerializer() for _ in range(2)]
            for serializer, part in zip(state, (model, optimizer), strict=True):
                serializer.save(part)
            optimizer = create()
            for serializer, part in zip(state, (optimizer.target, optimizer), strict=True):
                arrays = {key: np.array(x) for key, x in serializer.target.items()}
                chainer.serializers.NpzDeserializer(arrays).load(part)
            optimizer.is_changed(optimizer.target)  # as after loading a checkpoint
    for name in 'ab':
        left = vars(optimizer.compression or optimizer)
        left = left['residuals'].get(f'/{name}', 0) if 'residuals' in left else (
            left.get('state', {}).get(f'/{name}.error', 0))
        left = np.reshape(left, (8, 6)) if np.ndim(left) else np.zeros((8, 6))
        left = sum(comm.allgather_obj(left.astype('d'))) / comm.size
        np.testing.assert_allclose(getattr(optimizer.target, name).array, expected[name] + left,
                                   atol=.02 if dtype == 'e' else 1e-4)
