"""Functions that were patched for NumPy 2 give the results of plain NumPy, with gradients."""

import itertools
import types

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.training import extensions

pytestmark = pytest.mark.mpi_skip


def resizing(size, out, mode, align):
    """Return the matrix that resizes one axis."""
    matrix = np.zeros((out, size))
    for i in range(out):
        if mode == 'nearest':
            matrix[i, min(i * size // out, size - 1)] = 1
            continue
        at = i * (size - 1) / max(out - 1, 1) if align else max((i + .5) * size / out - .5, 0)
        low = int(at)
        matrix[i, low] += 1 - (at - low)
        matrix[i, min(low + 1, size - 1)] += at - low
    return matrix


@pytest.mark.parametrize(('shape', 'out'), [
    ((2, 3, 4, 5), (7, 3)), ((1, 2, 3, 3), (3, 3)), ((1, 1, 6, 2), (1, 5)),
    ((4, 64, 3, 3), (9, 40)),  # large enough to be computed in several pieces
])
@pytest.mark.parametrize(('mode', 'align'), [
    ('bilinear', True), ('bilinear', False), ('nearest', False), ('nearest', True)])
def test_resize_images(close, normal, shape, out, mode, align):
    x = chainer.Variable(normal(*shape, dtype='f'))
    rows, columns = (resizing(*sizes, mode, align) for sizes in zip(shape[2:], out, strict=True))
    y = F.resize_images(x, out, mode=mode, align_corners=align)
    assert y.dtype == 'f'
    close(y, rows @ x.array @ columns.T, 'f')
    gy = chainer.Variable(normal(*y.shape, dtype='f', seed=1))
    (gx,) = chainer.grad([y], [x], [gy], enable_double_backprop=True)
    close(gx, rows.T @ gy.array @ columns, 'f')
    (ggy,) = chainer.grad([gx], [gy], [x])
    close(ggy, y.array, 'f')


@pytest.mark.parametrize(('shape', 'strides', 'offset'), [
    ((2, 3), (3, 1), None), ((3, 2), (1, 3), 0), ((4, 5), (2, 1), 1), ((3, 4), (0, 1), 2),
    ((2, 3), (-3, -1), 11), ((2, 2, 2), (1, 1, 1), 3), ((5,), (2,), 1),
])
@pytest.mark.parametrize('dtype', 'efd')
def test_as_strided(check, normal, shape, strides, offset, dtype):
    index = (offset or 0) + np.tensordot(strides, np.indices(shape), 1)
    check(lambda x: F.as_strided(x, shape, strides, offset), lambda x: x.ravel()[index],
          normal(3, 4, dtype=dtype), dtype=dtype)


@pytest.mark.parametrize('dtype', '?bBhHiIlL')
def test_as_strided_of_integers(dtype):
    x = np.arange(12).astype(dtype)
    y = F.as_strided(x, (3, 4), (2, 1))
    assert y.dtype == dtype
    assert y.array.tolist() == [x[i:i + 4].tolist() for i in (0, 2, 4)]


def stored(number, dtype):
    """Return what an element of that type holds after ``number`` was stored, as in C."""
    dtype = np.dtype(dtype)
    if dtype.kind not in 'iu':
        return dtype.type(number)
    bits = 8 * dtype.itemsize
    number = int(number) % 2 ** bits
    return number - 2 ** bits * (dtype.kind == 'i' and number >= 2 ** (bits - 1))


def padded(xs, length, padding):
    y = np.zeros((len(xs), length or max(map(len, xs)), *xs[0].shape[1:]), xs[0].dtype)
    for row, x in zip(y, xs, strict=True):
        row[:len(x)], row[len(x):] = x, stored(padding, x.dtype)
    return y


@pytest.mark.parametrize('dtype', 'bBiLed')
@pytest.mark.parametrize('padding', [0, -1, 77, 2.5])
def test_pad_sequence(check, normal, dtype, padding):
    for tail, length in itertools.product([(), (2, 3)], [None, 6]):
        xs = [(normal(n, *tail, seed=n) * 9).astype(dtype) for n in (4, 0, 3)]
        y = F.pad_sequence(xs, length, padding)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.array, padded(xs, length, padding))
        if y.dtype.kind == 'f':
            check(lambda *xs: F.pad_sequence(xs, length, padding),  # noqa: B023
                  lambda *xs: padded(xs, length, padding), *xs, dtype=dtype)  # noqa: B023


@pytest.mark.parametrize('dtype', 'bBiLed')
@pytest.mark.parametrize('padding', [0, -1, 77, 2.5])
def test_concat_examples(normal, dtype, padding):
    xs = [(normal(*shape) * 9).astype(dtype) for shape in [(2, 3), (4, 1), (0, 5)]]
    expected = np.full((3, 4, 5), stored(padding, dtype), dtype)
    for each, x in zip(expected, xs, strict=True):
        each[:x.shape[0], :x.shape[1]] = x
    alone = chainer.dataset.concat_examples(xs, padding=padding)
    pairs = chainer.dataset.concat_examples([(x, 1) for x in xs], padding=(padding, 0))
    named = chainer.dataset.concat_examples([{'x': x} for x in xs], padding={'x': padding})
    for y in (alone, pairs[0], named['x']):
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize('batch, dtype', [((), 'f'), ((2, 3), 'd')])
@pytest.mark.parametrize('form', ['p', 'logit'])
def test_categorical(check, close, normal, batch, dtype, form):
    logits, others = (normal(*batch, 4, seed=seed) for seed in (0, 1))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (logits, others))
    given = {'p': np.log(p), 'logit': logits}[form]  # what the reference derives by
    values = np.random.RandomState(2).randint(0, 4, batch)
    Categorical = chainer.distributions.Categorical  # noqa: N806

    def reference(x):
        log_p = x if form == 'p' else x - np.log(np.exp(x).sum(-1, keepdims=True))
        y = np.zeros(batch)
        for index in np.ndindex(batch):
            y[index] = log_p[(*index, values[index])]
        return y

    for x in (values, chainer.Variable(values)):
        def log_prob(given, x=x):
            return Categorical(**{form: F.exp(given) if form == 'p' else given}).log_prob(x)

        eps = 1. if form == 'p' else 1e-4
        check(log_prob, reference, given.astype(dtype),
              dtype='f' if form == 'logit' else dtype, eps=eps)

    one = Categorical(**{form: (p if form == 'p' else logits).astype(dtype)})
    close(one.entropy, -(p * np.log(p)).sum(-1), dtype)
    two = Categorical(q.astype(dtype))
    close(chainer.kl_divergence(one, two), (p * np.log(p / q)).sum(-1), dtype)
    close(one.p, p, dtype)
    np.random.seed(0)
    sample = one.sample((500, 4)).array
    assert sample.shape == (500, 4, *batch)
    frequencies = np.stack([(sample == k).mean((0, 1)) for k in range(4)], -1)
    np.testing.assert_allclose(frequencies, p, atol=.06)  # 5 standard deviations


@pytest.mark.parametrize('value, dtype', [
    (.9, 'e'), (.9, 'f'), (.9, 'd'), (200, 'B'), (1 << 30, 'i'), (1, '?')])
@pytest.mark.parametrize('as_array', [False, True])
def test_means_of_observed_numbers(value, dtype, as_array):
    """NumPy 1 added them in float64."""
    number = np.array(value, dtype) if as_array else np.dtype(dtype).type(value)
    summary, weighted = chainer.reporter.DictSummary(), chainer.reporter.Summary()
    average = extensions.MicroAverage('x', 'n', 'y', trigger=lambda trainer: True)
    for _ in range(5000):
        summary.add({'x': number})
        weighted.add(number, np.int32(1 << 20))
    assert summary.compute_mean()['x'] == pytest.approx(float(number), rel=1e-12)
    assert weighted.compute_mean() == pytest.approx(float(number), rel=1e-12)
    average._trigger = lambda trainer: False
    trainer = types.SimpleNamespace(observation={'x': number, 'n': np.uint8(1)})
    for _ in range(5000):
        average(trainer)
    average._trigger = lambda trainer: True
    reporter = chainer.Reporter()
    with reporter.scope(trainer.observation):
        average(trainer)
    assert trainer.observation['y'] == pytest.approx(float(number), rel=1e-12)


def test_coordinates_of_regions():
    """The values are those of Chainer 7.8.1 with NumPy 1."""
    x, roi = np.arange(36, dtype='f').reshape(1, 1, 6, 6), np.array([[-7, 0, 23, 5]], 'f')
    for function, value in (F.roi_max_align_2d, 12.05), (F.roi_average_align_2d, 5.7875):
        assert function(x, roi, np.zeros(1, np.int32), 1, .1).array == pytest.approx(value)
