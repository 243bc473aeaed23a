"""Chainer's own networks on a GPU: forward, backward and three updates, as on the CPU.

Each in float32, float16 and mixed16.  The CPU computes the same network, from the same parameters,
in the same dtype; so what is compared is Chainer's GPU code with Chainer's CPU code.
"""

import copy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.utils import conv

pytestmark = [pytest.mark.gpu, pytest.mark.mpi_skip]

TOLERANCE = {'float32': 1e-4, 'float16': 2e-2, 'mixed16': 2e-2}
DTYPES = {'float32': np.dtype('f'), 'float16': np.dtype('e'), 'mixed16': chainer.mixed16}
OPTIMIZERS = {
    'SGD': lambda: chainer.optimizers.SGD(.05),
    'MomentumSGD': lambda: chainer.optimizers.MomentumSGD(.05),
    # Adam's first steps are of one size whatever the gradient; noise would decide their sign, and
    # this eps prevents it.
    'Adam': lambda: chainer.optimizers.Adam(.01, eps=1e-2),
}


class Net(chainer.Chain):
    """Links by name, and a function of them and the input."""

    def __init__(self, call, **links):
        super().__init__()
        self.call = call
        with self.init_scope():
            for name, link in links.items():
                setattr(self, name, link)

    def forward(self, x):
        return self.call(self, x)


def images(random):
    return random.uniform(-1, 1, (4, 3, 8, 8))


def rows(random):
    return random.uniform(-1, 1, (4, 6))


def words(random):
    return random.randint(0, 10, (4, 5)).astype('i')


def recurrent(net, x):
    net.a.reset_state()
    return [net.a(x), net.a(x * x)][-1]


def sequences(net, x):
    xs = [x[:3], x[1:3], x[:1]]
    return F.concat(net.a(None, None, xs)[2], axis=0)


# Name: the input, and how to make the network.  Dropout has a test of its own: it is random.
NETWORKS = {
    'Linear': (rows, lambda: Net(lambda n, x: n.a(x), a=L.Linear(6, 5))),
    'Convolution2D': (images, lambda: Net(lambda n, x: n.a(x), a=L.Convolution2D(3, 4, 3, 2, 1))),
    'Deconvolution2D': (images, lambda: Net(
        lambda n, x: n.a(x), a=L.Deconvolution2D(3, 4, 3, 2, 1))),
    'max_pooling_2d': (images, lambda: Net(
        lambda n, x: F.max_pooling_2d(n.a(x), 2), a=L.Convolution2D(3, 4, 3))),
    'average_pooling_2d': (images, lambda: Net(
        lambda n, x: F.average_pooling_2d(n.a(x), 2), a=L.Convolution2D(3, 4, 3))),
    'BatchNormalization': (images, lambda: Net(
        lambda n, x: n.b(n.a(x)), a=L.Convolution2D(3, 4, 3), b=L.BatchNormalization(4))),
    'LSTM': (rows, lambda: Net(recurrent, a=L.LSTM(6, 5))),
    'NStepLSTM': (rows, lambda: Net(sequences, a=L.NStepLSTM(2, 6, 5, 0))),
    'NStepGRU': (rows, lambda: Net(
        lambda n, x: F.concat(n.a(None, [x[:3], x[:2]])[1], axis=0), a=L.NStepGRU(1, 6, 5, 0))),
    'EmbedID': (words, lambda: Net(lambda n, x: n.a(x), a=L.EmbedID(10, 4))),
    'concat': (rows, lambda: Net(
        lambda n, x: F.concat([n.a(x), n.b(x)]), a=L.Linear(6, 2), b=L.Linear(6, 3))),
    'resize_images': (images, lambda: Net(
        lambda n, x: F.cast(F.resize_images(F.cast(n.a(x), 'f'), (9, 5)), n.a.W.dtype),
        a=L.Convolution2D(3, 4, 3))),
}


def make(name, dtype):
    """Return a network and its input, both on the host."""
    draw, network = NETWORKS[name]
    np.random.seed(0)  # Chainer's initializers draw from it
    net = network()
    x = draw(np.random.RandomState(1))
    return net, x if x.dtype.kind == 'i' else x.astype(chainer.get_dtype(dtype))


def loss_of(net, x):
    """Cross entropy over the second axis, so that softmax_cross_entropy is in every network."""
    y = net(x)
    labels = net.xp.arange(y.size // y.shape[1], dtype='i') % y.shape[1]
    return F.softmax_cross_entropy(y, labels.reshape(y.shape[:1] + y.shape[2:]))


def close(a, b, tolerance, name=''):
    a, b = chainer.backends.cuda.to_cpu(a), chainer.backends.cuda.to_cpu(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    np.testing.assert_allclose(a.astype('d'), b.astype('d'), tolerance, tolerance, err_msg=name)


@pytest.fixture(params=DTYPES)
def dtype(request):
    with chainer.using_config('dtype', DTYPES[request.param]):
        yield request.param


@pytest.fixture
def gpu(device):
    return chainer.get_device(f'@cupy:{device.id}')


@pytest.mark.parametrize('name', NETWORKS)
def test_forward_and_backward(gpu, name, dtype):
    net, x = make(name, DTYPES[dtype])
    there = copy.deepcopy(net)
    there.to_device(gpu)
    losses = []
    for each, data in [(net, x), (there, gpu.send(x))]:
        each.cleargrads()
        loss = loss_of(each, data)
        loss.backward()
        losses.append(loss.array)
    close(*losses, TOLERANCE[dtype])
    params = dict(there.namedparams())
    for path, param in net.namedparams():
        assert isinstance(params[path].grad, gpu.xp.ndarray)
        close(params[path].grad, param.grad, TOLERANCE[dtype], path)


@pytest.mark.sample(31)
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('name', NETWORKS)
def test_three_updates(gpu, name, optimizer, dtype):
    net, x = make(name, DTYPES[dtype])
    there = copy.deepcopy(net)
    there.to_device(gpu)
    for each, data in [(net, x), (there, gpu.send(x))]:
        rule = OPTIMIZERS[optimizer]().setup(each)
        if dtype != 'float32':
            rule.use_fp32_update()
        for _ in range(3):
            rule.update(loss_of, each, data)
    params = dict(there.namedparams())
    for path, param in net.namedparams():
        close(params[path].array, param.array, 5 * TOLERANCE[dtype], path)


def test_dropout(gpu, dtype):
    x = chainer.Variable(gpu.xp.ones((100, 100), chainer.get_dtype(DTYPES[dtype])))
    y = F.dropout(x, .25)
    F.sum(y).backward()
    kept = y.array != 0
    assert .7 < float(kept.mean()) < .8
    close(x.grad, y.array, 1e-3)
    close(y.array[kept], gpu.xp.full_like(y.array[kept], 1 / .75), 1e-3)


def test_second_derivative_of_lstm(gpu):
    """It goes through cupy.fuse."""
    grads = []
    random = np.random.RandomState(0)
    c, x = (random.standard_normal(shape).astype('f') for shape in [(2, 3), (2, 12)])
    for send in (lambda a: a, gpu.send):
        inputs = [chainer.Variable(send(c)), chainer.Variable(send(x))]
        first = chainer.grad(list(F.lstm(*inputs)), inputs, enable_double_backprop=True)
        F.sum(first[0] * first[0] + F.sum(first[1] * first[1])).backward()
        grads.append([v.grad for v in inputs])
    for here, there in zip(*grads, strict=True):
        close(there, here, 1e-4)


@pytest.mark.parametrize('dtype', ['uint8', 'int32', 'float16', 'float32'])
@pytest.mark.parametrize('padding', [0, -1])
def test_pad_sequence(gpu, dtype, padding):
    xs = [np.arange(6).reshape(3, 2).astype(dtype), np.ones((1, 2), dtype)]
    y = F.pad_sequence([gpu.send(x) for x in xs], padding=padding)
    close(y.array, F.pad_sequence(xs, padding=padding).array, 0)


@pytest.mark.limit(300)
def test_large_columns(gpu):
    """More than 2**31 of them; of all but the last image the gradient is zero."""
    shape = (2, 120, 1000, 1000)
    if gpu.device.mem_info[0] < 12e9:
        pytest.skip('needs 12 GB')
    columns = gpu.xp.zeros((*shape[:2], 3, 3, *shape[2:]), 'e')
    last = np.random.RandomState(0).standard_normal(columns.shape[2:]).astype('e')
    columns[-1, -1] = gpu.send(last)
    image = conv.col2im_gpu(columns, 1, 1, 1, 1, *shape[2:])
    del columns
    expected = conv.col2im_cpu(last[None, None].astype('f'), 1, 1, 1, 1, *shape[2:])
    np.testing.assert_allclose(image[-1, -1].get(), expected[0, 0], 2e-2, 2e-2)
    assert not image[:-1].any() and not image[-1, :-1].any()
    del image
    image = gpu.xp.zeros((1, 2150, 1000, 1000), 'i1')
    image[-1, -1, -1] = 1
    columns = conv.im2col_gpu(image, 1, 1, 1, 1, 0, 0)
    assert (columns[-1, -1, 0, 0, -1] == 1).all()
    assert int(columns[-1, -1].sum()) == 1000


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_binary_hierarchical_softmax(gpu, dtype):
    with chainer.using_config('dtype', np.dtype(dtype)):
        np.random.seed(0)
        net = L.BinaryHierarchicalSoftmax(3, ((0, 1), (2, 3)))
        x, t = np.random.standard_normal((4, 3)).astype(dtype), np.arange(4, dtype='i')
        there = copy.deepcopy(net)
        there.to_device(gpu)
        grads = []
        for each, send in [(net, lambda a: a), (there, gpu.send)]:
            each.cleargrads()
            each(chainer.Variable(send(x)), send(t)).backward()
            grads.append(each.W.grad)
        close(*grads, TOLERANCE[dtype])


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_negative_sampling(gpu, dtype):
    random = np.random.RandomState(0)
    x, w = (random.standard_normal(shape).astype(dtype) for shape in [(4, 3), (5, 3)])
    t, samples = np.array([1, 4, -1, 0], 'i'), random.randint(0, 5, (4, 3)).astype('i')
    grads = []
    for send in (lambda a: a, gpu.send):
        inputs = [chainer.Variable(send(a)) for a in (x, w)]
        drawn = send(samples)
        F.negative_sampling(
            inputs[0], send(t), inputs[1], lambda shape, drawn=drawn: drawn, 2).backward()
        grads.append([v.grad for v in inputs])
    for here, there in zip(*grads, strict=True):
        close(there, here, TOLERANCE[dtype])
