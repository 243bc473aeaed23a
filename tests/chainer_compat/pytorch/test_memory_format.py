"""Convolutions return arrays with channels last, which change nothing but strides."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from each_case import each_case
from kernel_cases import draw

pytest.importorskip('torch')
memory_format = pytest.importorskip('chainer_compat.pytorch.tensors.memory_format')
TorchDispatchMode = pytest.importorskip('torch.utils._python_dispatch').TorchDispatchMode

pytestmark = pytest.mark.mpi_skip


def are_last(x):
    """Whether channels are last in memory, also where both orders are the same."""
    return x.transpose(0, 2, 3, 1).flags.c_contiguous


class Blocks(chainer.Chain):
    """Each function with a kernel, and NumPy functions in between."""

    def __init__(self, n_channels=3, groups=1):
        super().__init__()
        with self.init_scope():
            self.c0 = L.Convolution2D(n_channels, 8, 3, pad=1, nobias=True)
            self.bn = L.BatchNormalization(8)
            self.c1 = L.Convolution2D(8, 8, 3, stride=2, pad=1, nobias=True, groups=groups)
            self.up = L.Deconvolution2D(8, 4, 2, 2, groups=groups)
            self.c2 = L.Convolution2D(12, 6, 1)
            self.scale = L.Scale(1, (6,))
            self.fc = L.Linear(None, 3)
        for i, param in enumerate(self.params()):
            if param.array is not None:
                param.array[...] = draw(*param.shape, dtype='f', seed=i) / 2

    def images(self, x):
        """Return the arrays of images between the functions."""
        a = F.relu(self.bn(self.c0(x)))
        b = F.leaky_relu(self.c1(F.local_response_normalization(a)))
        c = self.up(F.dropout(b, .3))
        d = self.c2(F.concat([a, c]))
        e = self.scale(d + F.average_pooling_2d(d, 3, 1, 1) * .5)
        return [a, b, c, d, e, F.max_pooling_2d(e, 3, 2, cover_all=False)]

    def forward(self, x):
        return F.sum(self.fc(F.tanh(self.images(x)[-1])) ** 2)


def trained(x, mode, n_steps=3, **options):
    """Return parameters, persistent arrays and gradients after some steps."""
    np.random.seed(0)
    model = Blocks(x.shape[1], **options)
    optimizer = chainer.optimizers.MomentumSGD(1e-3).setup(model)
    with chainer.using_config('use_torch', mode):
        for _ in range(n_steps):
            optimizer.update(model, x)
    return [*(param.array for param in model.params()), model.bn.avg_mean, model.bn.avg_var,
            *(param.grad for param in model.params())]


@each_case('shape, options', [((4, 3, 8, 12), {}), ((2, 1, 8, 8), {'groups': 4}),
                              ((1, 5, 6, 4), {'groups': 2})])
def test_training_agrees_with_chainer(shape, options):
    x = draw(*shape, dtype='f')
    expected = trained(x, 'never', **options)
    for order in 'CF':
        for a, b in zip(trained(np.asarray(x, order=order), 'auto', **options), expected,
                        strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * abs(b).max())
            assert a.flags.c_contiguous  # as optimizers and communicators exchange them fastest


#: Functions of an activation, (2, 4, 6, 6).
LAST = [
    lambda h: F.reshape(h, (2, -1)) ** 2, lambda h: F.mean(h, (2, 3)) ** 2,
    lambda h: F.sum(h, (2, 3)) ** 2, lambda h: F.average_pooling_2d(h, 6) ** 2,
    lambda h: F.max_pooling_2d(h, 2) ** 2, L.Linear(144, 2), L.Convolution2D(4, 64, 3),
    L.Convolution2D(4, 2, 1)]


@each_case('last', LAST)
def test_gradients_have_the_order_of_their_activations(last, monkeypatch):
    """PyTorch's kernel of a ReLU's gradient takes ten times as long with two orders."""
    monkeypatch.setattr(memory_format, 'MIN_ORDERED', 0)
    orders = []

    class Orders(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if 'threshold_backward' in str(function):
                orders.append([x.stride() for x in args[:2]])
            return function(*args, **(kwargs or {}))

    x = chainer.Variable(draw(2, 3, 6, 6, dtype='f'))
    loss = F.sum(last(F.relu(L.Convolution2D(3, 4, 3, pad=1)(x))))
    with Orders():
        loss.backward()
    assert orders == [[(144, 1, 24, 4)] * 2]


@pytest.mark.parametrize('order', 'CF')
def test_gradients_of_a_deconvolution_have_the_order_of_its_input(order):
    x = chainer.Variable(draw(2, 4, 6, 6, dtype='f') if order == 'C'
                         else draw(2, 6, 6, 4, dtype='f').transpose(0, 3, 1, 2))
    y = F.deconvolution_2d(x, draw(4, 3, 2, 2, dtype='f'), stride=2)
    y.grad = draw(*y.shape, dtype='f')
    y.backward()
    assert x.grad.strides == x.array.strides


def test_images_have_channels_last():
    x = draw(2, 3, 8, 8, dtype='f')
    for input in x, draw(2, 8, 8, 3, dtype='f').transpose(0, 3, 1, 2):
        assert all(are_last(each.array) for each in Blocks().images(chainer.Variable(input)))


@each_case('shape, W', [((2, 3, 5, 4), (4, 3, 3, 3)), ((2, 1, 5, 4), (4, 1, 3, 3)),
                        ((2, 4, 5, 4), (1, 4, 3, 3)), ((1, 8, 3, 3), (16, 8, 3, 3)),  # many weights
                        ((2, 4, 1, 1), (3, 4, 1, 1)), ((2, 4, 5, 4), (4, 1, 3, 3))])
def test_convolutions_and_their_gradients(shape, W):
    x, W = chainer.Variable(draw(*shape, dtype='f')), chainer.Variable(draw(*W, dtype='f'))
    y = F.convolution_2d(x, W, pad=1, groups=shape[1] // W.shape[1])
    F.sum(y * y).backward()
    assert are_last(y.array) and W.grad.flags.c_contiguous
    z = F.deconvolution_2d(y, draw(W.shape[0], 2, 2, 2, dtype='f'))
    assert are_last(z.array)


STRIDED = '''
import chainer, chainer.functions as F, chainer.links as L, numpy as np
for channels in range(1, 8):
    link = L.Convolution2D(channels, 6, 1, 2, nobias=True)
    for i in range(60):
        F.sum(link(np.random.randn(4, channels, 8, 8).astype('f'))).backward()
'''


def test_weights_of_strided_convolutions(python):
    """PyTorch 2.13 writes outside of their gradient if images have channels last."""
    python(STRIDED)


def test_dropout_draws_the_same_numbers():
    x = draw(2, 3, 4, 5, dtype='f')
    last = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    found = []
    for each in x, last:
        np.random.seed(0)
        y, mask = F.dropout(each, .4, return_mask=True)
        found.append((y.array, mask))
        assert F.dropout(each, .4, mask=mask).array.tobytes() == y.array.tobytes()
    assert all(map(are_last, found[1])) and not found[1][0].flags.c_contiguous
    np.testing.assert_array_equal(found[0], found[1])


@each_case('axis, keepdims', [(axis, keepdims) for axis in (None, 0, -1, (0, 2, 3), (1, -1), ())
                              for keepdims in (False, True)])
def test_sums_and_means(axis, keepdims):
    """Also of many numbers, which NumPy would add up with an error of 1e-3."""
    images = draw(20, 3, 100, 100, dtype='f') + 1
    x = chainer.Variable(np.moveaxis(np.ascontiguousarray(np.moveaxis(images, 1, -1)), -1, 1))
    for f, reference in (F.sum, np.sum), (F.mean, np.mean):
        y = f(x, axis=axis, keepdims=keepdims)
        expected = reference(images.astype('d'), axis=axis, keepdims=keepdims)
        assert y.dtype == np.float32 and y.shape == expected.shape
        np.testing.assert_allclose(y.array, expected, rtol=1e-6, atol=1e-6)
        x.cleargrad()
        F.sum(y * 3).backward()
        n = images.size / expected.size if f is F.mean else 1
        np.testing.assert_allclose(x.grad, 3 / n, rtol=1e-6)
