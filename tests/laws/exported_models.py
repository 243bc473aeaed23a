"""Random models for conversions: chains of functions and links with a batch axis."""

import dataclasses

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from hypothesis import strategies as st

LABELS = 3


def rows(h):
    """Return an array as a matrix."""
    return F.reshape(h, (len(h), -1))


def axis(h, a):
    """Return an axis other than the batch axis."""
    return 1 + a % (h.ndim - 1)


def unchained(y):
    y.unchain()
    return y


def without_graph(function, h):
    with chainer.no_backprop_mode():
        return function(h)


#: Functions that keep the shape and act on each element or on axes after the batch axis.
SMOOTH = {
    'tanh': F.tanh, 'sigmoid': F.sigmoid, 'elu': F.elu,
    'softplus': lambda h: F.softplus(h, 2.),
    'selu': F.selu, 'sin': F.sin, 'cos': F.cos, 'arctan': F.arctan, 'erf': F.erf,
    'exp': lambda h: F.exp(F.tanh(h)),
    'expm1': lambda h: F.expm1(F.tanh(h)),
    'square': lambda h: F.square(F.tanh(h)),
    'sqrt': lambda h: F.sqrt(F.square(h) + 1),
    'rsqrt': lambda h: F.rsqrt(F.square(h) + 1),
    'log1p': lambda h: F.log1p(F.square(h)),
    'log': lambda h: F.log(F.square(h) + 2),
    'sinh': lambda h: F.sinh(F.tanh(h)),
    'swish': lambda h: F.swish(h, np.ones(h.shape[1:], h.dtype)),
    'cosh': lambda h: F.cosh(F.tanh(h)),
    'softmax': lambda h: F.softmax(h, 1),
    'log_softmax': lambda h: F.log_softmax(h, -1),
    'normalize': lambda h: F.normalize(h, axis=1),
    'cumsum': lambda h: F.cumsum(h, 1),
    'neg': lambda h: -h,
    'add': lambda h: h + F.tanh(h),
    'sub': lambda h: 1 - h,
    'mul': lambda h: F.tanh(h) * h,
    'div': lambda h: h / (F.square(h) + 1),
    'pow': lambda h: F.tanh(h) ** 3,
    'power': lambda h: 2. ** F.tanh(h),
    'inverse': lambda h: 1 / (F.square(h) + 1),
    'powers': lambda h: (F.square(h) + 1) ** F.tanh(h),
    'add3': lambda h: F.add(h, h, F.sin(h)),
    'identity': F.identity,
    'copy': lambda h: F.copy(h, -1),
    'forget': lambda h: F.forget(F.tanh, h),
    'interpolate': lambda h: F.linear_interpolate(F.sigmoid(h), h, -h),
    'numpy': lambda h: h + np.exp(np.tanh(h.array)),
    'noise': lambda h: F.dropout(h, .3),
    'unchained': lambda h: h * unchained(F.sin(h)),
    'without graph': lambda h: h * without_graph(F.sin, h),
}
STEPPED = {
    'cumprod': lambda h: F.cumprod(F.tanh(h), -1),  # not in ONNX
    'relu': F.relu, 'leaky_relu': F.leaky_relu,
    'clipped_relu': lambda h: F.clipped_relu(h, .5),
    'hard_sigmoid': F.hard_sigmoid, 'relu6': F.relu6, 'abs': F.absolute, 'sign': F.sign,
    'floor': F.floor, 'ceil': F.ceil, 'fix': F.fix,
    'clip': lambda h: F.clip(h, -.5, .5),
    'maximum': lambda h: F.maximum(h, F.sin(h)),
    'minimum': lambda h: F.minimum(h, h * h),
    'where': lambda h: F.where(h.array > .1, h, -h),
    'fmod': lambda h: F.fmod(h, h * 0 + .7),
    'numpy where': lambda h: h * np.where(h.array > 0, 1, 2).astype(h.dtype),
}

#: Functions of an array and an integer that change the shape, by name.
SHAPED = {
    'flatten': lambda h, a: rows(h),
    'reshape': lambda h, a: F.reshape(h, (-1, *h.shape[1:][::-1])),
    'split': lambda h, a: F.reshape(rows(h), (h.shape[0], 1, -1)),
    'transpose': lambda h, a: F.transpose(h, (0, *range(1, h.ndim)[::-1])),
    'swapaxes': lambda h, a: F.swapaxes(h, axis(h, a), -1),
    'moveaxis': lambda h, a: F.moveaxis(h, axis(h, a), 1),
    'rollaxis': lambda h, a: F.rollaxis(h, axis(h, a), 1),
    'batch last': lambda h, a: F.moveaxis(F.tanh(F.moveaxis(h, 0, -1)), -1, 0),
    'expand_dims': lambda h, a: F.expand_dims(h, 1 + a % h.ndim) if h.ndim < 4 else h,
    'squeeze': lambda h, a: F.squeeze(F.sum(h, 1, keepdims=True), 1) if h.ndim > 2 else h,
    'separate': lambda h, a: F.stack(F.separate(h, 1)[::-1], 1),
    'split_axis': lambda h, a: F.concat(F.split_axis(h, [h.shape[1] // 2], 1)[::-1], 1),
    'concat': lambda h, a: F.concat([h, F.sin(h)], axis(h, a)),
    'hstack': lambda h, a: F.hstack([h, h]),
    'crelu': lambda h, a: F.crelu(h),
    'stack': lambda h, a: F.stack([h, -h], 1 + a % h.ndim) if h.ndim < 4 else h,
    'tile': lambda h, a: F.tile(h, (1, 2, *[1] * (h.ndim - 2))),
    'repeat': lambda h, a: F.repeat(h, 1 + a % 2, axis(h, a)),
    'pad': lambda h, a: F.pad(h, ((0, 0), (a % 2, 1), *[(0, 0)] * (h.ndim - 2)), 'constant'),
    'broadcast_to': lambda h, a: h + F.broadcast_to(F.mean(h, 1, keepdims=True), h.shape),
    'broadcast': lambda h, a: F.add(*F.broadcast(h, F.sum(h, -1, keepdims=True))),
    'flip': lambda h, a: F.flip(h, axis(h, a)),
    'fliplr': lambda h, a: F.fliplr(h),
    'maxout': lambda h, a: F.maxout(F.concat([h, -h], 1), 2),
    'max': lambda h, a: h - F.max(h, axis(h, a), keepdims=True),
    'min': lambda h, a: h - F.broadcast_to(F.min(h, axis(h, a), keepdims=True), h.shape),
    'sum': lambda h, a: F.sum(h, axis(h, a), keepdims=bool(a % 2) or h.ndim < 3),
    'mean': lambda h, a: F.mean(h, (axis(h, a),), keepdims=True),
    'prod': lambda h, a: F.prod(F.tanh(h), -1, keepdims=True),
    'average': lambda h, a: h * F.average(h, tuple(range(1, h.ndim)), keepdims=True),
    'logsumexp': lambda h, a: h - F.expand_dims(F.logsumexp(h, axis(h, a)), axis(h, a)),
    'argmax': lambda h, a: F.embed_id(
        F.argmax(rows(h), 1), np.eye(rows(h).shape[1], dtype=h.dtype)),
    'last': lambda h, a: h[..., -1:],
    'every second': lambda h, a: h[:, ::2],
    'backward': lambda h, a: h[:, ::-1],
    'list': lambda h, a: h[:, [-1, 0]],
    'array': lambda h, a: h[:, np.array([0, -1, 0], 'ilhb'[a % 4])],
    'mask': lambda h, a: h[:, np.arange(h.shape[1]) % 2 == 0],
    'new axis': lambda h, a: rows(h)[:, None],
    'numpy index': lambda h, a: h[:, np.int32(0):np.uint8(2)],
    'one': lambda h, a: rows(h)[:, -1, None],
    'permutate': lambda h, a: F.permutate(h, np.arange(h.shape[1])[::-1].astype('i'), 1),
    'matmul': lambda h, a: F.matmul(rows(h), np.ones((rows(h).shape[1], 3), h.dtype) * .1),
    'batch matmul': lambda h, a: F.matmul(h, h, transb=True) / h.shape[-1] if h.ndim > 2 else h,
    'tensordot': lambda h, a: F.tensordot(h, np.full((h.shape[1], 2), .2, h.dtype), ([1], [0])),
    'einsum': lambda h, a: F.einsum('n...i,ij->n...j', h, np.full((h.shape[-1], 2), .3, h.dtype)),
    'cast': lambda h, a: F.cast(F.cast(h, 'd'), h.dtype),
    'bias': lambda h, a: F.bias(h, np.arange(h.shape[1]).astype(h.dtype), 1),
    'scale': lambda h, a: F.scale(h, np.arange(h.shape[1]).astype(h.dtype) * .3, 1),
    'pooling': lambda h, a: F.average_pooling_2d(h, 2, 1, 1) if h.ndim == 4 else h,
    'max_pooling': lambda h, a: F.max_pooling_2d(h, 2, 1 + a % 2, 1, cover_all=a > 2)
    if h.ndim == 4 else h,
    'unpooling': lambda h, a: F.unpooling_2d(h, 2) if h.ndim == 4 else h,
    'pooling_1d': lambda h, a: F.max_pooling_1d(h, 2, 1, 1) if h.ndim == 3 else h,
    'lrn': lambda h, a: F.local_response_normalization(h, 3) if h.ndim == 4 else h,
    'resize': lambda h, a: F.repeat(h, 2, 3) if h.ndim == 4 else h,
}

#: Functions that mix examples or use the batch size.
BATCH = {
    'centered': lambda h, a: h - F.broadcast_to(F.mean(h, 0, keepdims=True), h.shape),
    'batch max': lambda h, a: h - F.max(h, 0, keepdims=True),
    'divided': lambda h, a: h / len(h),
    'batch sum': lambda h, a: h + F.sum(h, 0) / h.shape[0],
    'times': lambda h, a: h * .1 * len(h),
    'gram': lambda h, a: F.matmul(F.matmul(rows(h), rows(h), transb=True), rows(h)) * .1,
    'gram 2': lambda h, a: F.matmul(rows(h), F.matmul(rows(h), rows(h), transa=True)) * .1,
    'batch softmax': lambda h, a: F.softmax(h, 0),
    'batch cumsum': lambda h, a: F.cumsum(h, 0),
    'flipud': lambda h, a: F.flipud(h),
    'reversed': lambda h, a: h[::-1],
    'rolled': lambda h, a: F.concat([h[1:], h[:1]], 0),
    'all rows': lambda h, a: h[:len(h)],
    'twice': lambda h, a: F.concat([h, h], 0),
    'vstack': lambda h, a: F.vstack([h, -h])[len(h):],
    'pairs': lambda h, a: F.reshape(F.concat([h, -h], 0), (2, *h.shape))[0],
    'batch repeat': lambda h, a: F.repeat(h, 2, 0),
    'batch tile': lambda h, a: F.tile(h, (2, *[1] * (h.ndim - 1))),
    'but one': lambda h, a: F.pad(h, ((1, 0), *[(0, 0)] * (h.ndim - 1)), 'constant')[:-1],
    'state': lambda h, a: F.concat([h, np.zeros((len(h), *h.shape[1:]), h.dtype)], 1),
    'ones': lambda h, a: h + np.full(h.shape, .5, h.dtype),
    'scatter': lambda h, a: F.scatter_add(h, (slice(None), 0), h[:, -1]),
    'numpy mean': lambda h, a: h - h.array.mean(0),
}

#: Functions that behave differently for some batch sizes, so a module may accept only one size.
DISTINGUISHING = {
    'half': lambda h, a: h[:(len(h) + a % 2) // 2],
    'at most': lambda h, a: h[:min(len(h), 2 + a)],
    'stride': lambda h, a: h[::max(1, len(h) // 4)],
    'odd': lambda h, a: h * (1 + len(h) % 2),
    'threshold': lambda h, a: F.tanh(h) if len(h) > 2 + a else h,
    'all axes': lambda h, a: F.squeeze(
        F.mean(rows(h), 1, keepdims=True))[..., None],
    'power of size': lambda h, a: h * len(h) ** -.5,
    'numbers': lambda h, a: F.transpose(
        F.transpose(h) * np.arange(len(h)).astype(h.dtype)),
    'sequences': lambda h, a: F.pad_sequence(
        [F.sum(x)[None] for x in F.separate(h)]),
}

LINKS = {
    'linear': lambda shape, a: L.Linear(int(np.prod(shape[1:])), 2 + a % 3),
    'linear 2': lambda shape, a: L.Linear(None, 3, nobias=a % 2),
    'batch norm': lambda shape, a: L.BatchNormalization(shape[1], eps=1e-3),
    'batch norm axis': lambda shape, a: L.BatchNormalization(
        axis=(0, *range(1, len(shape) - 1)), size=shape[-1], eps=1e-3),
    'layer norm': lambda shape, a: L.LayerNormalization(shape[1]) if len(shape) == 2 else None,
    'group norm': lambda shape, a: L.GroupNormalization(1, shape[1]),
    'convolution': lambda shape, a: L.ConvolutionND(
        len(shape) - 2, shape[1], 2, 2, 1 + a % 2, 1, cover_all=a > 2) if len(shape) > 2 else None,
    'convolution 2d': lambda shape, a: L.Convolution2D(
        shape[1], 3, 3, pad=1, nobias=a % 2) if len(shape) == 4 else None,
    'deconvolution': lambda shape, a: L.Deconvolution2D(
        shape[1], 2, 2, 1 + a % 2) if len(shape) == 4 else None,
    'prelu': lambda shape, a: L.PReLU(shape[1:]),
    'maxout': lambda shape, a: L.Maxout(
        int(np.prod(shape[1:])), 2, 2),
    'highway': lambda shape, a: L.Highway(
        shape[1]) if len(shape) == 2 else None,
    'scale': lambda shape, a: L.Scale(1, shape[1:]),
    'lstm': lambda shape, a: L.LSTM(int(np.prod(shape[1:])), 3),
    'gru': lambda shape, a: L.StatefulGRU(int(np.prod(shape[1:])), 2),
    'bilinear': lambda shape, a: L.Bilinear(  # which supports no other dtype
        *[int(np.prod(shape[1:]))] * 2, 3) if chainer.config.dtype == 'f' else None,
    'dropconnect': lambda shape, a: L.SimplifiedDropconnect(int(np.prod(shape[1:])), 3),
    'renormalization': lambda shape, a: L.BatchRenormalization(
        shape[1], rmax=1.5, dmax=.5, eps=1e-3) if len(shape) == 2 else None,
}

#: Functions that also get labels.
LABELED = {
    'select': lambda h, t, a: h * F.reshape(
        F.select_item(rows(h), t % rows(h).shape[1]), (-1, *[1] * (h.ndim - 1))),
    'embed': lambda h, t, a: F.concat([rows(h), F.embed_id(
        t, np.arange(LABELS * 2).reshape(LABELS, 2).astype(h.dtype), -1 + a % 3)], 1),
    'columns': lambda h, t, a: h * F.mean(F.concat([rows(h)] * LABELS, 1)[:, t]),
    'rows': lambda h, t, a: h[t % 1] + h,
    'entropy': lambda h, t, a: h * F.reshape(
        F.softmax_cross_entropy(F.concat([rows(h)] * 3, 1), t, reduce='no'),
        (-1, *[1] * (h.ndim - 1))),
    'mask': lambda h, t, a: h * F.reshape(
        (t > 0).astype(h.dtype), (-1, *[1] * (h.ndim - 1))),
    'where': lambda h, t, a: F.where(np.broadcast_to(
        (t > 1).reshape(-1, *[1] * (h.ndim - 1)), h.shape), h, -h),
    'number': lambda h, t, a: h * t.astype(h.dtype).reshape(-1, *[1] * (h.ndim - 1)),
    'mean loss': lambda h, t, a: h * F.softmax_cross_entropy(F.concat([rows(h)] * 3, 1), t),
}
FAMILIES = {'smooth': SMOOTH, 'stepped': STEPPED, 'shaped': SHAPED, 'batch': BATCH,
            'distinguishing': DISTINGUISHING, 'link': LINKS, 'labeled': LABELED}
SHAPES = (4,), (3, 2), (2, 4, 3), (6, 1, 5), (1,)


class Model(chainer.Chain):
    """Runs the steps of a program. The first call determines the sizes of its links."""

    def __init__(self, program):
        super().__init__()
        self.steps = program.steps
        with chainer.using_config('dtype', np.dtype(program.dtype)):
            h = chainer.Variable(program.arrays(2)[0])
            t = program.arrays(2)[1]
            with chainer.using_config('train', False), chainer.no_backprop_mode():
                for i, (family, name, a) in enumerate(self.steps):
                    if family == 'link' and (link := LINKS[name](h.shape, a)) is not None:
                        self.add_link(f'l{i}', link)
                    h = self.step(i, h, t)
        random = np.random.RandomState(program.seed)
        for _, param in sorted(self.namedparams()):
            param.array[...] = random.uniform(-1, 1, param.shape)
        for _, link in sorted(self.namedlinks()):
            if hasattr(link, 'avg_var'):
                link.avg_mean[...] = random.uniform(-1, 1, link.avg_mean.shape)
                link.avg_var[...] = random.uniform(.5, 2, link.avg_var.shape)

    def step(self, i, h, t):
        family, name, a = self.steps[i]
        if h.size > 400 * max(1, len(h)) or (len(t) != len(h) and family == 'labeled'):
            return h
        if family == 'link':
            link = getattr(self, f'l{i}', None)
            if link is None:
                return h
            if isinstance(link, L.LSTM | L.StatefulGRU):
                link.reset_state()
                link(h)
                return link(F.sin(h))
            if isinstance(link, L.SimplifiedDropconnect):
                return link(h, bool(chainer.config.train))
            return link(h, rows(h)) if isinstance(link, L.Bilinear) else link(h)
        call = FAMILIES[family][name]
        if family == 'labeled':
            return call(h, t, a)
        return call(h) if family in ('smooth', 'stepped') else call(h, a)

    def forward(self, x, t):
        h = chainer.as_variable(x)
        for i in range(len(self.steps)):
            h = self.step(i, h, t)
        return h


@dataclasses.dataclass(frozen=True)
class Exported:
    """A model, an example input, and the options of the conversion."""

    steps: tuple
    shape: tuple = (4,)
    batch: int = 3
    dtype: str = 'd'
    labels: str = 'i'
    train: bool = False
    seed: int = 0
    layout: str = 'C'

    def model(self):
        return Model(self)

    def arrays(self, n, seed=0):
        """Return inputs of n examples."""
        random = np.random.RandomState(1000 * n + seed + self.seed)
        x = random.uniform(-1.5, 1.5, (n, *self.shape)).astype(self.dtype)
        t = random.randint(0, LABELS, n).astype(self.labels)
        if self.layout == 'F':
            x = np.asfortranarray(x)
        elif self.layout == 'strided':
            x = np.repeat(x, 2, -1)[..., ::2]
        return x, t

    @property
    def is_distinguishing(self):
        return any(family == 'distinguishing' for family, *_ in self.steps)


@st.composite
def exported(draw, families=tuple(FAMILIES), dtypes='ddf', train=(False, True)):
    """Draw a model and example inputs."""
    steps = draw(st.lists(st.sampled_from(families).flatmap(lambda family: st.tuples(
        st.just(family), st.sampled_from(sorted(FAMILIES[family])), st.integers(0, 4))),
        min_size=1, max_size=6))
    return Exported(
        tuple(steps), draw(st.sampled_from(SHAPES)), draw(st.sampled_from([3, 2, 4, 1, 5, 8])),
        draw(st.sampled_from(dtypes)), draw(st.sampled_from('ilhb')),
        draw(st.sampled_from(train)), draw(st.integers(0, 3)),
        draw(st.sampled_from(['C', 'C', 'F', 'strided'])))
