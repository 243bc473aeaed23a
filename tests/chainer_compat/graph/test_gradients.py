"""Gradients that are computed in fewer passes are bitwise identical to Chainer's."""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import Variable
from chainer.functions.array.get_item import GetItemGrad
from chainer.functions.loss import softmax_cross_entropy

pytestmark = pytest.mark.mpi_skip
NODE = softmax_cross_entropy._SoftmaxCrossEntropyGrad_NoDoubleBackprop


def gradient(x, t, options, gy):
    x = Variable(x)
    loss = F.softmax_cross_entropy(x, t, **options)
    loss.grad = np.full_like(loss.array, gy)
    loss.backward()
    return x.grad


@pytest.mark.parametrize('options', [
    {}, {'normalize': False}, {'cache_score': False}, {'reduce': 'no'}, {'ignore_label': 2},
    {'class_weight': np.array([1, .5, 2, 0, 3], 'f')}], ids=str)
@pytest.mark.parametrize('dtype', 'efd')
@pytest.mark.parametrize('labels', [
    [0, 4, 2, 1, 2, 3], [-1, 4, -1, 1, 0, 2], [-1] * 6], ids=str)
def test_the_same_bits(monkeypatch, options, dtype, labels):
    if dtype != 'f' and 'class_weight' in options:
        options = {'class_weight': options['class_weight'].astype(dtype)}
    x = np.random.RandomState(0).standard_normal((len(labels), 5)).astype(dtype)
    x[:1, :2] = [np.inf, np.nan]
    x[1:2, 3] = -np.inf
    with np.errstate(invalid='ignore'):
        found = gradient(x, np.array(labels, 'i'), options, .7)
        monkeypatch.setattr(NODE, 'forward_cpu', NODE.forward_cpu.__wrapped__)
        expected = gradient(x, np.array(labels, 'i'), options, .7)
    assert found.dtype == expected.dtype and found.flags.c_contiguous
    assert found.tobytes() == expected.tobytes()


def test_the_formula():
    x = np.random.RandomState(1).standard_normal((4, 3))
    t = np.array([0, 2, -1, 1])
    y = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    expected = (y - np.eye(3)[t]) * (t >= 0)[:, None] / 3 * 2
    np.testing.assert_allclose(gradient(x, t, {}, 2.), expected, 1e-12, 1e-14)


def test_higher_dimensions_and_soft_targets(monkeypatch):
    random = np.random.RandomState(2)
    x = random.standard_normal((2, 3, 4)).astype('f')
    t = random.randint(-1, 3, (2, 4)).astype('i')
    soft = np.abs(random.standard_normal((5, 3))).astype('f')
    found = [gradient(x, t, {}, 1), gradient(soft, soft, {}, 1)]
    monkeypatch.setattr(NODE, 'forward_cpu', NODE.forward_cpu.__wrapped__)
    for one, other in zip(found, [gradient(x, t, {}, 1), gradient(soft, soft, {}, 1)], strict=True):
        assert one.tobytes() == other.tobytes()


def test_one_pass(monkeypatch):
    """Chainer multiplies a copy in place; this one does not copy the array."""
    node = NODE(-1, None, np.full((2, 3), .5, 'f').view(Counting), np.float64(.5), False)
    node.forward_cpu((np.zeros((2, 3), 'f'), np.array([0, 1]), np.ones((), 'f')))
    assert not Counting.copies


class Counting(np.ndarray):
    copies = 0

    def copy(self, order='C'):
        Counting.copies += 1
        return super().copy(order)


BASIC = [0, -1, np.int64(1), slice(None), slice(3, 0, -2), slice(5, 9), Ellipsis, None, (1, 2, 3),
         (np.int32(1), Ellipsis, None, slice(1, 3)), (Ellipsis, 2), ()]
OTHERS = [[0, 0, 2], ([1, 1], slice(None), [0, 3]), np.array([[0, 1], [1, 1]]),
          np.arange(4) % 2 == 0, True, (slice(None), np.array([2, 2]))]


@pytest.mark.parametrize('dtype', ['e', 'f', 'd', 'i'])
@pytest.mark.parametrize('slices', [*BASIC, *OTHERS], ids=str)
def test_slices(slices, dtype):
    """The reference is ``numpy.add.at`` itself."""
    shape = 4, 3, 4
    drawn = np.random.RandomState(0).standard_normal(np.zeros(shape)[slices].shape)
    gy = np.asarray(10 * drawn).astype(dtype)
    if gy.size and dtype != 'i':
        gy.flat[0] = -0.
        gy.flat[-1] = np.nan
    expected = np.zeros(shape, dtype)
    np.add.at(expected, slices, gy)
    found, = F.get_item(Variable(expected), slices).creator_node.backward((0,), (Variable(gy),))
    assert found.dtype == dtype and found.array.tobytes() == expected.tobytes()


def test_slices_outside():
    with pytest.raises(IndexError, match='does not support backward'):
        GetItemGrad((7,), (4, 3)).apply([np.zeros(3, 'f')])


@pytest.mark.parametrize('slices', BASIC, ids=str)
def test_slices_without_add_at(monkeypatch, slices):
    monkeypatch.setattr('chainer.functions.array.get_item.numpy', WithoutAddAt)
    monkeypatch.setattr('chainer.backend.get_array_module', lambda *_: WithoutAddAt)
    x = np.zeros((4, 3, 4), 'f')
    gx, = GetItemGrad(slices if isinstance(slices, tuple) else (slices,), x.shape).forward((
        np.ones_like(x[slices]),))
    x[slices] = 1
    assert gx.tolist() == x.tolist()


class WithoutAddAt:
    integer, zeros = np.integer, np.zeros


def test_labels_of_another_length():
    x = chainer.Variable(np.ones((6, 4), 'f'))
    with chainer.using_config('type_check', False):
        loss = F.softmax_cross_entropy(x, np.array([0, 1, 2, 3, 1]))
        with pytest.raises(ValueError, match='broadcast'):
            loss.backward()


@pytest.mark.parametrize('shape', [(), (1,), (1, 1), (6, 1), (6, 4)])
def test_gradients_of_the_loss_of_any_shape(shape):
    x = chainer.Variable(np.random.RandomState(0).randn(6, 4).astype('f'))
    labels = np.arange(6) % 4
    loss = F.softmax_cross_entropy(x, labels)
    gx, = chainer.grad([loss], [x], [chainer.Variable(np.full(shape, 3, 'f'))])
    expected = (F.softmax(x).array - np.eye(4)[labels]) / 2
    np.testing.assert_allclose(gx.array, expected, 1e-5, 1e-6)


def test_gradients_of_slices_of_another_shape():
    x = chainer.Variable(np.ones((4, 6), 'f'))
    with pytest.raises(ValueError, match='broadcast'):
        chainer.grad([x[:2]], [x], [chainer.Variable(np.ones((1, 2, 6), 'f'))])
