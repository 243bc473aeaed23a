"""Calls of Chainer 1, whose results are in ``old_calls.json``, recorded with Chainer 1.24.0.

Recording: ``python3.6 old_calls.py > old_calls.json`` in a folder without other modules.
"""

import importlib
import json
import os
import tempfile

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import Variable, cuda, gradient_check, optimizers, serializers, training
from chainer.training import extensions


def x(*shape):
    return np.sin(np.arange(np.prod(shape), dtype='f')).reshape(shape)


def v(*shape, **kw):
    return Variable(x(*shape), **kw)


def weights(link):
    """Return the initial weights: sorted, as the order of parameters changed."""
    return [p.data for _, p in sorted(link.namedparams())]


def gradients(y, *inputs):
    y.grad = np.asarray(np.cos(y.data))
    y.backward()
    return [y.data] + [i.grad for i in inputs]


def applied(function, *inputs):
    """Return outputs and gradients of a function."""
    inputs = [Variable(i) for i in inputs]
    return gradients(function(*inputs), *inputs)


def seeded(make):
    np.random.seed(0)
    return weights(make())


def labels():
    return np.array([1, 0], 'i')


def stepped(use, optimizer=None, **kw):
    """Return the parameters and gradients of a model after ``use(optimizer, model)``."""
    model = chainer.Chain(a=L.Linear(3, 2, initialW=x(2, 3)), b=L.Linear(2, 2, initialW=x(2, 2)))
    optimizer = optimizer or optimizers.SGD(.1)
    optimizer.setup(model)
    model.zerograds()
    for p in (model.a.W, model.a.b):
        p.grad = np.cos(p.data)
    value = use(optimizer, model)
    return [value, weights(model), [p.grad for _, p in sorted(model.namedparams())]]


class Momentum(chainer.optimizer.GradientMethod):
    def __init__(self, lr):
        self.lr = lr

    def init_state_cpu(self, param, state):
        state['v'] = np.ones_like(param.data)

    def update_one_cpu(self, param, state):
        state['v'] *= .5 / self.t
        state['v'] -= self.lr * param.grad
        param.data += state['v']


class PlainUpdate(Momentum):
    def update_one(self, param, state):
        param.data -= self.lr * param.grad


def update_twice(optimizer, model):
    for _ in range(2):
        optimizer.update()


class Both(chainer.Function):
    """Keeps an output, and returns a gradient for one of two inputs."""

    def check_type_forward(self, in_types):
        assert len(in_types) == 2

    def forward_cpu(self, inputs):
        self.y = inputs[0] * inputs[1]
        return self.y, inputs[0] + 1

    def backward_cpu(self, inputs, grad_outputs):
        gy, gz = grad_outputs
        return (gy * inputs[1] + self.y + gz if gz is not None else gy), None


def old_function(both):
    a, b = v(2, 2), v(2, 2)
    y, z = Both()(a, b)
    return gradients(y + z if both else y, a, b)


def state_of(flag, use=lambda h: h):
    """Return values, volatile and creator of variables that depend on a volatile one."""
    h = v(2, 3, volatile=flag)
    model = L.Linear(3, 2, initialW=x(2, 3))
    ys = [h, use(h), model(h), F.relu(model(h)) + 1, Variable(model(h).data)]
    return [[y.data, repr(y.volatile), y.creator is None] for y in ys]


def mixed(first, second):
    try:
        y = v(2, volatile=first) + v(2, volatile=second)
    except ValueError:
        return 'error'
    return [repr(y.volatile), y.creator is None]


def changed(first, second):
    h = v(2)
    h.volatile = first
    y = F.exp(h)
    h.volatile = second
    z = F.exp(h)
    return [repr(y.volatile), y.creator is None, repr(z.volatile), z.creator is None]


def flags():
    from chainer.flag import OFF, Flag, aggregate_flags
    on, off, auto = chainer.ON, chainer.OFF, chainer.AUTO
    return [on == 'on', on == True, bool(on), bool(off), off is OFF, auto == 'auto', on != off,  # noqa: E712
            Flag('ON') is on, chainer.Flag(None) is auto, repr([on, off, auto]), str(on),
            repr(aggregate_flags([on, auto])), repr(aggregate_flags([auto]))]


def function_set():
    np.random.seed(0)
    model = chainer.FunctionSet(l1=F.Linear(3, 4), l2=F.Linear(4, 2))
    other = chainer.FunctionSet(l1=F.Linear(3, 4), l2=F.Linear(4, 2))
    other.l2 = F.Linear(4, 2, wscale=4)
    other['l2'].W.data[...] = x(2, 4)
    model.copy_parameters_from(other.parameters)
    optimizer = optimizers.SGD(lr=.1)
    optimizer.setup(model.collect_parameters())
    optimizer.zero_grads()
    zeros = [g.sum() for g in model.gradients]
    loss = F.softmax_cross_entropy(model.l2(F.relu(model.l1(v(2, 3)))), Variable(labels()))
    loss.backward()
    model.gradients = [g * 2 for g in model.gradients]
    optimizer.update()
    found = weights(model)
    model.parameters = [p * 0 for p in model.parameters]
    return [zeros, loss.data, found, weights(model)]


class Late(chainer.Link):
    def __init__(self):
        super().__init__()
        self.add_uninitialized_param('W')

    def __call__(self, h):
        if self.has_uninitialized_params:
            self.add_param('W', h.shape[1], initializer=chainer.initializers.Constant(2))
        return h * F.broadcast_to(self.W, h.shape)


def uninitialized():
    link = Late()
    optimizer = optimizers.SGD(.1)
    optimizer.setup(link)
    before = link.has_uninitialized_params
    for _ in range(2):
        optimizer.update(lambda: F.sum(link(v(2, 3))))
    return [before, link.has_uninitialized_params, link.W.data]


class Scaled(chainer.Link):
    """A custom link with initial weights as in Chainer's."""

    def __init__(self, *args, **kw):
        super().__init__()
        self.add_param('W', (3, 2), initializer=chainer.initializers._get_initializer(*args, **kw))


def scaled(*args, **kw):
    return seeded(lambda: Scaled(*args, **kw))


def gru(*args, **kw):
    np.random.seed(0)
    link = L.GRU(*args, **kw)
    h = link(v(2, 3), v(2, link.W.W.data.shape[1]))
    return [h.data, link(h, v(2, link.W.W.data.shape[1])).data]


class Counter(training.Extension):
    invoke_before_training = True
    trigger = 1, 'iteration'

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, trainer):
        self.calls.append(trainer.updater.iteration)


def trained(extension):
    optimizer = optimizers.SGD()
    optimizer.setup(L.Classifier(L.Linear(2, 2)))
    iterator = chainer.iterators.SerialIterator([(i, np.int32(1)) for i in x(4, 2)], 2)
    updater = training.StandardUpdater(iterator, optimizer)
    trainer = training.Trainer(updater, (2, 'iteration'))
    calls = []
    trainer.extend(extension(calls), name='calls')
    trainer.run()
    return calls


def made(**kw):
    return lambda calls: training.make_extension(trigger=(1, 'iteration'), **kw)(
        lambda trainer: calls.append(trainer.updater.iteration))


def inception_train():
    link = L.InceptionBN(2, 0, 2, 2, 2, 2, 'max')
    before = link.train
    link.train = False
    link(Variable(BATCH))
    means = link.conv3n.avg_mean.tolist()
    link(Variable(BATCH), test=False)
    return [before, link.train, means, means == link.conv3n.avg_mean.tolist()]


def missing(call):
    try:
        call()
    except RuntimeError:
        return 'no CUDA'


def zero_grads(optimizer, model):
    optimizer.zero_grads()


def accumulate(optimizer, model):
    optimizer.accumulate_grads([p.data for p in model.params()])


def unpooled(h):
    p = F.MaxPooling2D(2, 2, use_cudnn=False)
    return F.upsampling_2d(p(h), p.indexes, (p.kh, p.kw), (p.sy, p.sx), (p.ph, p.pw), (4, 4))


def batch_normalization_function(*options, **keywords):
    from chainer.functions.normalization.batch_normalization import BatchNormalizationFunction
    mean, var = x(3), x(3) ** 2 + .5
    function = BatchNormalizationFunction(1e-7, mean, var, *options, **keywords)
    found = applied(function, x(4, 3) * 5, x(3), x(3))
    return [*found, function.running_mean, function.running_var, mean, var]


def with_statistics():
    from chainer.functions.normalization.batch_normalization import BatchNormalizationFunction
    function = BatchNormalizationFunction(1e-7, None, None, False, 0)
    return applied(function, x(4, 3) * 5, x(3), x(3), x(3), x(3) ** 2 + .5)


def npz():
    path = os.path.join(tempfile.mkdtemp(), 'a')
    link, other = L.Linear(3, 2, **K), L.Linear(3, 2)
    serializers.save_npz(filename=path, obj=link)
    serializers.load_npz(filename=path, obj=other)
    return weights(other)


K = {'initialW': x(2, 3)}
BATCH = x(2, 2, 4, 4)
W4, B4 = x(2, 2, 3, 3), x(2)
N_STEP = [1, .5, v(2, 2, 4), [[v(4, 3), v(4, 4)]] * 2, [[v(4), v(4)]] * 2, [v(2, 3), v(1, 3)]]

CASES = {
    'relu': lambda: applied(lambda h: F.relu(h, use_cudnn=False), x(2, 3)),
    'relu_position': lambda: applied(lambda h: F.relu(h, False), x(2, 3)),
    'tanh': lambda: applied(lambda h: F.tanh(h, use_cudnn=True), x(2, 3)),
    'sigmoid': lambda: applied(lambda h: F.sigmoid(h, use_cudnn=False), x(2, 3)),
    'softmax': lambda: applied(lambda h: F.softmax(h, use_cudnn=False), x(2, 3)),
    'log_softmax': lambda: applied(lambda h: F.log_softmax(h, use_cudnn=False), x(2, 3)),
    'softmax_cross_entropy': lambda: applied(
        lambda h: F.softmax_cross_entropy(h, labels(), use_cudnn=False, normalize=False), x(2, 3)),
    'sigmoid_cross_entropy': lambda: applied(
        lambda h: F.sigmoid_cross_entropy(h, np.ones((2, 3), 'i'), use_cudnn=False), x(2, 3)),
    'max_pooling_2d': lambda: applied(
        lambda h: F.max_pooling_2d(h, 2, 1, 0, True, use_cudnn=False), BATCH),
    'max_pooling_nd': lambda: applied(lambda h: F.max_pooling_nd(h, 2, use_cudnn=False), BATCH),
    'average_pooling_2d': lambda: applied(
        lambda h: F.average_pooling_2d(h, 2, 1, 1, False), BATCH),
    'average_pooling_nd': lambda: applied(
        lambda h: F.average_pooling_nd(h, 2, use_cudnn=False), BATCH),
    'convolution_2d': lambda: applied(lambda *a: F.convolution_2d(
        *a, stride=2, pad=1, use_cudnn=False, deterministic=True), BATCH, W4, B4),
    'convolution_2d_position': lambda: applied(
        lambda *a: F.convolution_2d(a[0], a[1], a[2], 2, 1, False, True, True), BATCH, W4, B4),
    'convolution_nd': lambda: applied(
        lambda *a: F.convolution_nd(*a, use_cudnn=False), BATCH, W4, B4),
    'deconvolution_2d': lambda: applied(lambda *a: F.deconvolution_2d(
        a[0], a[1], a[2], 1, 0, None, False, True), BATCH, W4, B4),
    'deconvolution_nd': lambda: applied(
        lambda *a: F.deconvolution_nd(*a, use_cudnn=False), BATCH, W4, B4),
    'dilated_convolution_2d': lambda: applied(
        lambda *a: F.dilated_convolution_2d(*a, pad=2, dilate=2, use_cudnn=False), BATCH, W4, B4),
    'fixed_batch_normalization': lambda: applied(
        lambda *a: F.fixed_batch_normalization(*a, use_cudnn=False),
        x(3, 2), B4, B4, B4, np.ones(2, 'f'))[0],  # the gradients were those of eps=0
    'batch_normalization': lambda: applied(
        lambda *a: F.batch_normalization(a[0], a[1], a[2], .1, np.zeros(2, 'f'), np.ones(2, 'f'),
                                         .5, False), x(3, 2), B4, B4)[0],
    'spatial_pyramid_pooling_2d': lambda: applied(
        lambda h: F.spatial_pyramid_pooling_2d(h, 2, F.MaxPooling2D, use_cudnn=False), BATCH),
    'pooling_class': lambda: applied(
        lambda h: F.spatial_pyramid_pooling_2d(h, 2, pooling_class=F.MaxPooling2D), BATCH),
    'MaxPooling2D': lambda: applied(lambda h: F.MaxPooling2D(3, 2, 1, False)(h), BATCH),
    'unpooled': lambda: applied(unpooled, BATCH),
    'Softmax': lambda: applied(lambda h: F.Softmax(use_cudnn=False)(h), x(2, 3)),
    'n_step_birnn': lambda: F.n_step_birnn(*N_STEP, train=False, activation='relu')[0].data,
    'n_step_birnn_position': lambda: F.n_step_birnn(*([*N_STEP, False, False, 'tanh']))[0].data,
    'called_function': lambda: applied(
        lambda h, g: F.Concat(1)(F.Sigmoid()(h), g), x(2, 3), x(2, 1)),
    'F.InceptionBN': lambda: F.InceptionBN is L.InceptionBN,
    'F.modules': lambda: [F.minmax.max is F.max, L.linear.Linear is L.Linear],
    'moved': lambda: (
        importlib.import_module('chainer.functions.activation.lstm').lstm is F.lstm),
    'npz': npz,
    'get_cross_validation_datasets_random': lambda: len(
        chainer.datasets.get_cross_validation_datasets_random(x(6), n_fold=3, seed=0)),
    'init_weight': lambda: [chainer.init_weight(a, 2, 3) or a for a in [x(2, 2)]],
    'numerical_grad': lambda: getattr(
        gradient_check, 'numerical_grad_cpu', gradient_check.numerical_grad)(
            lambda: (K['initialW'] ** 2,), (K['initialW'],), (x(2, 3),)),
    'cuda': lambda: [missing(lambda: cuda.init()), missing(lambda: cuda.zeros((2, 2))),
                     missing(lambda: cuda.full_like(x(2), 3))],
    'Linear_wscale': lambda: seeded(lambda: L.Linear(3, 2, wscale=4, bias=.5)),
    'Linear_position': lambda: seeded(lambda: L.Linear(3, 2, 4, .5, False, None)),
    'Linear_initialW': lambda: seeded(lambda: L.Linear(3, 2, wscale=4, nobias=True, **K)),
    'Linear_initial_bias': lambda: seeded(
        lambda: L.Linear(3, 2, wscale=4, bias=1, initial_bias=x(2))),
    'Linear_callable': lambda: seeded(
        lambda: L.Linear(3, 2, wscale=1, initialW=chainer.initializers.One())),
    'F.Linear': lambda: seeded(lambda: F.Linear(3, 2, wscale=.25)),
    'Convolution2D': lambda: seeded(lambda: L.Convolution2D(2, 3, 3, wscale=2, bias=1)),
    'Convolution2D_nobias': lambda: seeded(lambda: L.Convolution2D(2, 3, 3, 1, 1, 2, nobias=True)),
    'Convolution2D_position': lambda: seeded(
        lambda: L.Convolution2D(2, 3, 3, 1, 1, 2, .1, False, False, None, x(3), True)),
    'Deconvolution2D': lambda: seeded(
        lambda: L.Deconvolution2D(2, 3, 3, wscale=2, bias=1, use_cudnn=False, deterministic=True)),
    'Deconvolution2D_callable': lambda: seeded(
        lambda: L.Deconvolution2D(2, 3, 3, wscale=4, initialW=chainer.initializers.Constant(.5))),
    'DilatedConvolution2D': lambda: seeded(
        lambda: L.DilatedConvolution2D(2, 3, 3, wscale=2, bias=1, use_cudnn=False)),
    'Maxout': lambda: seeded(lambda: L.Maxout(3, 2, 2, wscale=4)),
    'MLPConvolution2D': lambda: seeded(lambda: L.MLPConvolution2D(2, (3, 4), 3, wscale=4)),
    'GRU': lambda: gru(3),
    'GRU_names': lambda: gru(n_units=3, n_inputs=2),
    'InceptionBN': lambda: L.InceptionBN(
        2, 0, 2, 2, 2, 2, 'max')(Variable(BATCH), test=True).data.shape,
    'InceptionBN_train': inception_train,
    'function': lambda: [old_function(both) for both in (False, True)],
    'volatile_on': lambda: state_of('on'),
    'volatile_True': lambda: state_of(True, lambda h: F.dropout(h, train=False)),
    'volatile_off': lambda: state_of('off', F.exp),
    'volatile_False': lambda: state_of(False, lambda h: h.reshape((3, 2)) if 0 else h + 1),
    'volatile_ON': lambda: state_of(chainer.ON, lambda h: F.concat([h, h], 0)),
    'volatile_position': lambda: [[repr(a.volatile), a.name, a.grad] for a in (
        Variable(x(2), 'auto', 'name', x(2)), Variable(x(2)), L.Linear(2, 0).W)],
    'volatile_mixed': lambda: [mixed(a, b) for a in ('on', 'off', 'auto')
                               for b in (True, False, 'auto')],
    'volatile_changed': lambda: [changed('on', 'off'), changed('auto', 'on')],
    'volatile_no_backward': lambda: F.sum(v(2, volatile='on') ** 2).backward(),
    'BatchNormalizationFunction': lambda: [
        batch_normalization_function(True, .8, False),
        batch_normalization_function(train=True, decay=.8, use_cudnn=False), with_statistics()],
    'Flag': flags,
    'FunctionSet': function_set,
    'uninitialized': uninitialized,
    '_get_initializer': lambda: [
        scaled(None, scale=.5), scaled(3, scale=.5), scaled(x(3, 2), scale=.5), scaled(None, 2)],
    'zero_grads': lambda: stepped(zero_grads),
    'weight_decay': lambda: stepped(lambda o, m: o.weight_decay(.5)),
    'clip_grads': lambda: stepped(lambda o, m: o.clip_grads(.7)),
    'clip_grads_below': lambda: stepped(lambda o, m: o.clip_grads(70)),
    'compute_grads_norm': lambda: stepped(lambda o, m: o.compute_grads_norm()),
    'accumulate_grads': lambda: stepped(accumulate),
    'own_optimizer': lambda: stepped(update_twice, Momentum(.1)),
    'own_update_one': lambda: stepped(update_twice, PlainUpdate(.1)),
    'invoke_before_training': lambda: [trained(Counter), trained(made(invoke_before_training=True)),
                                       trained(made(invoke_before_training=False))],
    'snapshot_trigger': lambda: list(extensions.snapshot_object(
        None, 'a', trigger=(3, 'iteration')).trigger),
}


def plain(value):
    """Return a value as numbers, strings and lists."""
    if isinstance(value, (list, tuple)):
        return [plain(y) for y in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    return float(f'{value:.6g}') if isinstance(value, (float, np.floating)) else value


def names():
    """Return the functions and classes of Chainer's modules."""
    modules = chainer, F, L, cuda, chainer.initializers, chainer.optimizer, gradient_check
    return {m.__name__: [n for n in sorted(vars(m)) if n[0] != '_' and
                         getattr(vars(m)[n], '__module__', '').startswith('chainer')]
            for m in modules}


if __name__ == '__main__':
    print(json.dumps({'names': names(),
                      'values': {name: plain(case()) for name, case in CASES.items()}}))
