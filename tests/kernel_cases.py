"""Calls of Chainer functions that together use every PyTorch kernel."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


def draw(*shape, dtype='d', seed=0):
    return np.random.RandomState(seed).standard_normal(shape).astype(dtype)


def rnn(function, gates, directions=1, cell=False):
    """Return a case of one layer."""
    def case(v):
        xs = [v(3, 5), v(3, 5), v(2, 5)]
        h = [v(directions, 3, 4) for _ in range(1 + cell)]
        ws = [[v(4, 5 if g < gates // 2 else 4) for g in range(gates)] for _ in range(directions)]
        bs = [[v(4) for _ in range(gates)] for _ in range(directions)]
        *states, ys = function(1, 0., *h, ws, bs, xs)
        return [*states, *ys]
    return case


def lstm_link(v):
    link = L.NStepLSTM(1, 5, 4, 0.)
    for param in link.params():
        param.array = draw(*param.shape, dtype=v.dtype)
    link.cleargrads()
    *states, ys = link(v(1, 3, 4), v(1, 3, 4), [v(3, 5), v(2, 5), v(4, 5)])
    return [*states, *ys]


def running(v, *shape):
    return F.batch_normalization(
        v(4, *shape, 2, 1) if len(shape) == 1 else v(4, *shape), v(*shape), v(*shape),
        running_mean=np.zeros(shape, v.dtype), running_var=np.ones(shape, v.dtype))


def dropped(v):
    np.random.seed(0)
    return F.dropout(F.convolution_2d(v(2, 3, 4, 5), v(4, 3, 1, 1)), .3)


IDS = np.array([[0, 2, 2], [1, 0, 3]], 'i')

#: Functions whose second derivatives other functions compute, or for which Chainer has none.
ONCE = [
    lambda v: F.softmax_cross_entropy(v(2, 4, 3), IDS), lstm_link,
    lambda v: F.local_response_normalization(v(2, 7, 3, 2), 5, 1., .1, .5),
    lambda v: F.local_response_normalization(v(2, 3), 7),
    rnn(F.n_step_lstm, 8, cell=True), rnn(F.n_step_gru, 6), rnn(F.n_step_rnn, 2),
    rnn(F.n_step_birnn, 2, 2),
]

CASES = [
    lambda v: F.convolution_2d(v(2, 4, 6, 5), v(3, 4, 3, 2), v(3), stride=2, pad=1),
    lambda v: F.convolution_2d(v(1, 4, 6, 5), v(4, 2, 1, 1), groups=2),
    lambda v: F.convolution_2d(v(3, 1, 5, 5), v(1, 1, 3, 3), v(1), dilate=2),
    lambda v: F.deconvolution_2d(v(2, 4, 3, 4), v(4, 3, 3, 3), v(3), stride=2, pad=1),
    lambda v: F.deconvolution_2d(v(1, 4, 3, 4), v(4, 2, 3, 3), v(4), groups=2),
    lambda v: F.convolution_nd(v(2, 4, 6), v(3, 4, 3), v(3)),
    lambda v: F.convolution_nd(v(1, 2, 4, 3, 4), v(3, 2, 2, 2, 2), v(3)),
    lambda v: F.deconvolution_nd(v(2, 4, 6), v(4, 3, 3), v(3)),
    lambda v: F.deconvolution_nd(v(2, 2, 3, 2, 2), v(2, 2, 2, 2, 2), v(2)),
    lambda v: F.linear(v(4, 3), v(5, 3), v(5)),
    lambda v: F.linear(v(1, 3), v(1, 3)),
    lambda v: F.linear(v(3, 1), v(4, 1), v(4)),
    lambda v: running(v, 3),
    lambda v: running(v, 3, 2),
    lambda v: F.batch_normalization(v(4, 3, 5), v(3), v(3), axis=(0, 2)),
    lambda v: F.batch_normalization(v(4, 1, 5), v(1), v(1), axis=(0, 2)),
    lambda v: F.batch_normalization(v(4, 3, 5), v(5), v(5), axis=(0, 1)),
    lambda v: F.fixed_batch_normalization(v(4, 3), v(3), v(3), v(3), v(3) ** 2 + 1),
    lambda v: F.max_pooling_2d(v(2, 3, 6, 5), 3, 2, 1),
    lambda v: F.max_pooling_2d(v(1, 1, 4, 4), 2, cover_all=False),
    lambda v: F.average_pooling_2d(v(2, 3, 6, 5), 3, 2, 1),
    dropped,
    lambda v: F.sum(F.convolution_2d(v(2, 3, 4, 5), v(4, 3, 1, 1)), axis=(0, -1)),
    lambda v: F.mean(F.convolution_2d(v(2, 3, 4, 5), v(4, 3, 1, 1)), axis=1, keepdims=True),
    lambda v: F.relu(v(3, 4)),
    lambda v: F.relu(v(1, 2, 1, 3)),
    lambda v: F.relu(v()),
    lambda v: F.leaky_relu(v(3, 4), .3),
    lambda v: F.leaky_relu(v(3, 1), -.5),
    lambda v: F.leaky_relu(v()),
    lambda v: F.softmax(v(2, 4, 3)), lambda v: F.softmax(v(2, 3, 4, 5), axis=-1),
    lambda v: F.softmax(F.convolution_2d(v(2, 3, 4, 5), v(4, 3, 1, 1))),
    lambda v: F.log_softmax(v(3, 4)),
    lambda v: F.log_softmax(v(2, 3, 4), axis=-1),
    lambda v: F.embed_id(IDS, v(4, 3), ignore_label=2),
    *ONCE,
]


class Inputs:
    """Draws the inputs of a case as Variables. By default, all of them need gradients."""

    def __init__(self, dtype, needed=range(1000)):
        self.dtype, self.needed = dtype, needed
        self.drawn = []

    def __call__(self, *shape):
        n = len(self.drawn)
        self.drawn.append(chainer.Variable(
            draw(*shape, dtype=self.dtype, seed=n), requires_grad=n in self.needed))
        return self.drawn[-1]
