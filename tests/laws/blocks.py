"""Blocks of random models: ``block(h)`` maps an array of shape (n, width) to the same shape."""

import random

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.link_hooks import SpectralNormalization, WeightStandardization


class Init(chainer.initializer.Initializer):
    """Random values that depend on the shape and a seed."""

    def __init__(self, *seed, dtype='f'):
        super().__init__(dtype)
        self.seed = seed

    def __call__(self, array):
        draw = np.random.RandomState([*self.seed, *array.shape])
        array[...] = draw.standard_normal(array.shape) / np.sqrt(max(1, *array.shape[-1:], 1))


class Block(chainer.Chain):
    """A chain of links whose initial values depend on a seed.

    Args:
        width: The length of the rows.
        seed: The seed, a tuple of integers.
        dtype: The dtype of the parameters.
    """

    def __init__(self, width, seed, dtype):
        super().__init__()
        self.width, self.seed, self.dtype = width, seed, dtype
        with chainer.using_config('dtype', np.dtype(dtype)), self.init_scope():
            self.build()

    def build(self):
        raise NotImplementedError

    def init(self, *n):
        return Init(*self.seed, *n, dtype=self.dtype)

    def linear(self, n, n_in=None, n_out=None):
        return L.Linear(n_in or self.width, n_out or self.width, initialW=self.init(n),
                        initial_bias=self.init(n, 1))

    def array(self, *shape):
        return chainer.Parameter(self.init(9), shape)


class Linear(Block):
    def build(self):
        self.fc = self.linear(0)

    def forward(self, h):
        return F.tanh(self.fc(h))


class Late(Block):
    """A link that initializes its parameters in the first call."""

    def build(self):
        self.fc = L.Linear(None, self.width, initialW=self.init(0))

    def forward(self, h):
        return F.tanh(self.fc(h))


class Residual(Block):
    def build(self):
        self.one, self.two = self.linear(0), self.linear(1)

    def forward(self, h):
        return h + self.two(F.relu(self.one(h)))


class Summed(Block):
    """The sum of two parameters, whose gradients are one array."""

    def build(self):
        self.V, self.W = self.array(self.width, self.width), self.array(self.width, self.width)
        self.b = self.array(self.width)

    def forward(self, h):
        return F.tanh(F.linear(h, self.W + self.V, self.b)) + F.broadcast_to(
            self.b, h.shape)


class Listed(Block):
    """A list of links, one of which is used twice."""

    def build(self):
        self.layers = chainer.ChainList(self.linear(0), self.linear(1))

    def forward(self, h):
        for link in (*self.layers, self.layers[0]):
            h = F.sigmoid(link(h))
        return h


class Convolution(Block):
    def build(self):
        self.conv = L.Convolution1D(1, 2, 3, pad=1, initialW=self.init(0))
        self.back = L.Deconvolution1D(2, 1, 1, initialW=self.init(1))

    def forward(self, h):
        return self.back(F.leaky_relu(self.conv(h[:, None])))[:, 0]


class Image(Block):
    def build(self):
        self.conv = L.Convolution2D(1, 3, (1, 3), pad=(0, 1), initialW=self.init(0))
        self.scale = L.Scale(1, (3,))

    def forward(self, h):
        return F.max(self.scale(self.conv(h[:, None, None])), 1)[:, 0]


class Normalized(Block):
    def build(self):
        self.norm = L.LayerNormalization(self.width)

    def forward(self, h):
        return self.norm(h) + h


class Activated(Block):
    """Functions with parameters or several outputs."""

    def build(self):
        self.prelu, self.slope = L.PReLU((self.width,)), L.Swish((self.width,))
        self.bias = L.Bias(1, (self.width,))

    def forward(self, h):
        a, b = F.split_axis(F.concat([self.prelu(h), self.slope(h)]), 2, 1)
        return F.maximum(a, self.bias(b)) + F.elu(F.minimum(a, b))


class Embedded(Block):
    """An embedding of labels that depend on the input. Most of its rows get no gradient."""

    def build(self):
        self.embed = L.EmbedID(7, self.width, initialW=self.init(0))

    def forward(self, h):
        labels = (np.abs(h.array).sum(1) * 10).astype('i') % 7
        return h * self.embed(labels)


class Attention(Block):
    """Matrix products, softmax and reshaping."""

    def build(self):
        self.W = self.array(self.width, self.width)

    def forward(self, h):
        x = F.expand_dims(h, 2) * F.broadcast_to(self.W[None], (*h.shape, self.width))
        weights = F.softmax(F.matmul(x, x, transb=True), axis=2)
        return F.sum(F.matmul(weights, x), 2) / self.width


class Recurrent(Block):
    """An LSTM over the columns of each row."""

    def build(self):
        self.rnn = L.LSTM(1, 2, lateral_init=self.init(0), upward_init=self.init(1))

    def forward(self, h):
        self.rnn.reset_state()
        ys = [self.rnn(column) for column in F.split_axis(h, self.width, 1)]
        return h + F.concat([y[:, :1] - y[:, 1:] for y in ys])


class Sequences(Block):
    """A layer for sequences of different lengths."""

    def build(self):
        self.rnn = L.NStepGRU(1, 1, self.width, 0)
        for n, (_, param) in enumerate(sorted(self.rnn.namedparams())):
            self.init(n)(param.array)

    def forward(self, h):
        if not len(h):
            return h
        end, _ = self.rnn(None, [F.expand_dims(x, 1)[:1 + n % self.width]
                                 for n, x in enumerate(F.separate(h))])
        return end[0] + h


class Batch(Block):
    """Batch normalization: statistics of the batch, and moving averages."""

    def build(self):
        self.norm = L.BatchNormalization(self.width, dtype=self.dtype)

    def forward(self, h):
        return self.norm(h)


class Renormalized(Block):
    """Batch renormalization: training also uses the statistics of earlier batches."""

    def build(self):
        self.norm = L.BatchRenormalization(self.width, dtype=self.dtype)

    def forward(self, h):
        return self.norm(h) + h


class Spectral(Block):
    """A link hook with a state that each call changes."""

    def build(self):
        self.fc = self.linear(0).add_hook(SpectralNormalization())

    def forward(self, h):
        return F.tanh(self.fc(h))


class Standardized(Block):
    """A link hook without a state."""

    def build(self):
        self.fc = self.linear(0).add_hook(WeightStandardization())

    def forward(self, h):
        return F.tanh(self.fc(h))


class Dropout(Block):
    def build(self):
        self.fc = self.linear(0)

    def forward(self, h):
        return F.dropout(self.fc(h), .4)


class Noise(Block):
    """Noise that NumPy draws outside of Chainer's functions."""

    def build(self):
        self.W = self.array(self.width)

    def forward(self, h):
        noise = np.random.standard_normal(h.shape).astype(h.dtype)
        return h + noise * F.broadcast_to(self.W, h.shape)


class Depth(Block):
    """Stochastic depth with Python's random numbers: a parameter may get no gradient."""

    def build(self):
        self.fc = self.linear(0)

    def forward(self, h):
        return h + self.fc(h) if random.random() < .5 else h


class Counter(Block):
    """Numbers that each call changes: in an attribute, a persistent value and a tuple in a dict."""

    def build(self):
        self.fc = self.linear(0)
        self.calls, self.kept = 0, {'factors': (np.ones(()),)}
        self.add_persistent('decay', np.ones((), 'f'))

    def forward(self, h):
        self.calls += 1
        self.decay *= .9
        factor, = self.kept['factors']
        factor *= 1.1
        return self.fc(h) * (self.dtype_of(self.decay * factor) / self.calls)

    def dtype_of(self, x):
        return np.dtype(self.dtype).type(x)


class Memory(Block):
    """A link that keeps its state from call to call."""

    def build(self):
        self.cell = L.StatefulGRU(self.width, self.width, init=self.init(0),
                                  inner_init=self.init(1))

    def forward(self, h):
        if self.cell.h is not None and self.cell.h.shape != h.shape:
            self.cell.reset_state()
        y = self.cell(h)
        self.cell.h = chainer.Variable(y.array)  # without its graph
        return y


#: Blocks that process each row independently and always return the same result.
BY_ROW = {block.__name__: block for block in (
    Linear, Late, Residual, Summed, Listed, Convolution, Image, Normalized, Activated, Embedded,
    Attention, Recurrent, Sequences)}
#: Blocks whose results depend on random numbers or on earlier calls. A call may also change their
#: state.
STATEFUL = {block.__name__: block for block in (
    Batch, Renormalized, Spectral, Standardized, Dropout, Noise, Depth, Counter, Memory)}
BLOCKS = BY_ROW | STATEFUL
