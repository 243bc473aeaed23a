"""Small calls whose results changed between versions of Chainer.

With an old version on Python 3.6, this writes a file of test data:

    python write_values.py FOLDER
"""

import collections
import inspect
import os
import sys
import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import initializers, iterators, optimizers, training
from chainer.functions.noise.dropout import dropout
from chainer.links.model.vision import vgg
from chainer.training import extensions


def values(*shape):
    return np.sin(np.arange(int(np.prod(shape))) * 1.7).astype('f').reshape(shape)


def normalized(eps=2e-5, avg_var=None):
    link = L.BatchNormalization(3, eps=eps)
    if avg_var is not None:
        link.avg_var[...] = avg_var
    link(values(4, 3))
    return link


def parameters(link):
    return [param.data.shape for _, param in sorted(link.namedparams())]


def copied():
    link = L.BatchNormalization(3)
    link.copyparams(normalized())
    return link.avg_mean


class Model(chainer.Chain):
    def __init__(self):
        super(Model, self).__init__(l1=L.Linear(2, 2))

    def __call__(self, x):
        loss = F.sum(F.dropout(self.l1(x)))
        chainer.report({'loss': loss}, self)
        return loss


def dataset(n, repeat=True, shuffle=False):
    return iterators.SerialIterator([values(2) + i for i in range(n)], 2, repeat, shuffle)


def evaluated():
    model = Model()
    model.l1.W.data[...] = 1
    found = extensions.Evaluator(dataset(4, repeat=False), model)()['main/loss']
    return float(found.data if isinstance(found, chainer.Variable) else found)


def epochs_of_optimizer():
    optimizer = optimizers.SGD()
    optimizer.setup(Model())
    updater = training.StandardUpdater(dataset(4), optimizer)
    for _ in range(4):
        updater.update()
    return optimizer.epoch


def are_variables():
    model, optimizer, seen = Model(), optimizers.SGD(), []
    optimizer.setup(model)

    def loss(x):
        seen.append(isinstance(x, chainer.Variable))
        return model(x)

    training.StandardUpdater(dataset(4), optimizer, loss_func=loss).update()
    extensions.Evaluator(dataset(2, repeat=False), model, eval_func=loss)()
    return seen


def late_link():
    model, optimizer = Model(), optimizers.SGD(.1)
    optimizer.setup(model)
    model.add_link('l2', L.Linear(2, 2))
    model.l2.W.data[...] = 1
    optimizer.update(lambda x: F.sum(model.l2(x)), values(2, 2))
    return model.l2.W.data


class Vision(vgg.VGG16Layers):
    functions = collections.OrderedDict([('prob', [dropout])])

    def __init__(self):
        chainer.Chain.__init__(self)


def orders(iterator):
    found = np.concatenate([next(iterator) for _ in range(7)])
    if hasattr(iterator, 'finalize'):
        iterator.finalize()
    return found


def kept_gradient():
    y = F.sum(chainer.Variable(values(3)) * 2)
    y.backward()
    return y.grad is not None


def given_gradient():
    x = chainer.Variable(values(3))
    y = x * 2
    y.grad = values(3)
    y.backward()
    return [x.grad, np.zeros(3) if y.grad is None else y.grad]


def gradient_at_bounds():
    x = chainer.Variable(np.array([-1, 0, .5, 1, 2], 'f'))
    F.sum(F.clip(x, 0., 1.)).backward()
    return x.grad


def takes_old_positions():
    try:
        return L.MLPConvolution2D(2, (2,), 1, 1, 0, 4, F.tanh).activation is F.tanh
    except TypeError:  # wscale where it expects the activation
        return False


def glorot():
    array = np.zeros((3, 2, 3, 3), 'f')
    initializers.GlorotNormal()(array)
    return array


#: By name: the last version with the old meaning, and a call.
CASES = {
    'split_axis': (1, lambda: isinstance(F.split_axis(values(2, 2), 1, 0), tuple)),
    'forget_bias': (1, lambda: L.LSTM(2, 2).upward.b.data),
    'forget_bias_stateless': (1, lambda: L.StatelessLSTM(2, 2).upward.b.data),
    'conv_nd': (1, lambda: len(parameters(L.ConvolutionND(2, 2, 3, 3)))),
    'conv_nd_bias': (7, lambda: len(parameters(L.ConvolutionND(2, 2, 3, 3, initial_bias=0)))),
    'deconv_nd': (7, lambda: len(parameters(L.DeconvolutionND(2, 2, 3, 3)))),
    'deconv_nd_none': (1, lambda: len(parameters(
        L.DeconvolutionND(2, 2, 3, 3, initial_bias=None)))),
    'glorot': (1, glorot),
    'len': (1, lambda: len(chainer.Variable(values(2, 3)))),
    'evaluator': (1, evaluated),
    'variables': (1, are_variables),
    'vision': (1, lambda: Vision()(values(2, 50))['prob'].data),
    'late_link': (1, late_link),
    'positions': (1, takes_old_positions),
    'lstm_inside': (7, lambda: [L.StatefulPeepholeLSTM(2, 2)(values(1, 2)).data.shape,
                                F.max_pooling_2d(values(1, 1, 4, 4), 2).data.shape]),
    'matmul': (2, lambda: F.matmul(values(3), values(3), transb=True).data),
    'multiprocess': (2, lambda: orders(iterators.MultiprocessIterator(
        list(range(7)), 3, n_processes=1))),
    'avg_var': (4, lambda: normalized().avg_var),
    'eps': (3, lambda: normalized(eps=.1, avg_var=0).avg_var),
    'copyparams': (4, copied),
    'new_epoch': (4, epochs_of_optimizer),
    'serial': (4, lambda: orders(iterators.SerialIterator(list(range(7)), 3))),
    'kept_gradient': (5, kept_gradient),
    'given_gradient': (5, given_gradient),
    'clip': (5, gradient_at_bounds),
}
VERSION = os.environ.get('CHAINER_COMPAT_DIALECT', chainer.__version__[0])
X, W, IMAGE = values(2, 4), values(3, 2, 3, 3), values(2, 2, 5, 5)

#: Calls with arguments in the order of version 1.
POSITIONS = {
    'Linear': lambda: L.Linear(4, 3, 2., .5),
    'Linear nobias': lambda: L.Linear(4, 3, 1, 0, True),
    'Convolution2D': lambda: L.Convolution2D(2, 3, 3, 1, 1, 1.41),
    'Convolution2D all': lambda: L.Convolution2D(
        2, 3, 3, 1, 1, 1, 0., False, False, W, values(3), True),
    'Deconvolution2D': lambda: L.Deconvolution2D(2, 3, 3, 1, 1, 2., .1, False, (6, 6)),
    'DilatedConvolution2D': lambda: L.DilatedConvolution2D(2, 3, 3, 1, 1, 2, 2., .1),
    'ConvolutionND': lambda: L.ConvolutionND(2, 2, 3, 3, 1, 0, W, values(3)),
    'DeconvolutionND': lambda: L.DeconvolutionND(
        2, 2, 3, 3, 1, 0, None, values(2, 3, 3, 3), values(3)),
    'MLPConvolution2D': lambda: L.MLPConvolution2D(2, (3, 2), 1, 1, 0, 2., F.tanh, True)(IMAGE),
    'Maxout': lambda: L.Maxout(4, 3, 2, 2.),
    'GRU': lambda: L.GRU(3, 4)(chainer.Variable(values(2, 3)), chainer.Variable(X)),
    'BatchNormalization': lambda: L.BatchNormalization(
        3, .9, 2e-5, np.float32, True, True, None, None, False),
    'softmax': lambda: F.softmax(X, False),
    'log_softmax': lambda: F.log_softmax(X, True),
    'convolution_2d': lambda: F.convolution_2d(IMAGE, W, None, 2, 0, False, True),
    'convolution_nd': lambda: F.convolution_nd(IMAGE, W, None, 2, 0, False, True),
    'deconvolution_nd': lambda: F.deconvolution_nd(
        IMAGE, values(2, 3, 3, 3), None, 1, 0, None, False),
    'dilated_convolution_2d': lambda: F.dilated_convolution_2d(
        IMAGE, W, None, 1, 0, 2, False, True),
    'fixed_batch_normalization': lambda: F.fixed_batch_normalization(
        X, *[values(4) + 2] * 4 + [2e-5, False]),
    'max_pooling_2d': lambda: F.max_pooling_2d(IMAGE, 3, 2, 0, True, False),
    'max_pooling_nd': lambda: F.max_pooling_nd(IMAGE, 3, 2, 0, True, False),
    'average_pooling_nd': lambda: F.average_pooling_nd(IMAGE, 2, 2, 1, False),
    'softmax_cross_entropy': lambda: F.softmax_cross_entropy(
        X, np.array([1, 3], 'i'), False, False, True, None, 1),
    'sigmoid_cross_entropy': lambda: F.sigmoid_cross_entropy(
        X, np.array([[0, 1, 1, -1]] * 2, 'i'), False, False),
    'n_step_rnn': lambda: F.n_step_rnn(
        1, .5, values(1, 2, 3), [[values(3, 2), values(3, 3)]], [[values(3), values(3)]],
        [values(2, 2)] * 2, False, False, 'relu')[0],
    'inside': lambda: L.Inception(2, 1, 1, 1, 1, 1, 1)(IMAGE),
}


def arrays(result):
    if isinstance(result, chainer.Link):
        return [param.data for _, param in sorted(result.namedparams())]
    return result.data


if VERSION == '1':
    CASES.update({'positions of ' + name: (1, lambda call=call: arrays(call()))
                  for name, call in POSITIONS.items()})
if hasattr(iterators, 'MultithreadIterator'):
    CASES['multithread'] = (4, lambda: orders(iterators.MultithreadIterator(
        list(range(7)), 3, n_threads=1)))
if hasattr(L, 'BatchRenormalization'):
    CASES['renormalization'] = (4, lambda: L.BatchRenormalization(3).avg_var)


#: Functions and links whose order of arguments changed after version 1.
SIGNATURES = (
    F.average_pooling_nd, F.convolution_2d, F.convolution_nd, F.deconvolution_nd,
    F.dilated_convolution_2d, F.fixed_batch_normalization, F.log_softmax, F.max_pooling_2d,
    F.max_pooling_nd, F.n_step_birnn, F.n_step_rnn, F.sigmoid_cross_entropy, F.softmax,
    F.softmax_cross_entropy, L.BatchNormalization, L.Convolution2D, L.ConvolutionND,
    L.Deconvolution2D, L.DeconvolutionND, L.DilatedConvolution2D, L.GRU, L.Linear,
    L.MLPConvolution2D, L.Maxout, training.make_extension)


def arguments(function):
    """Return the names of the arguments of a function or constructor; also on Python 3.6."""
    is_link = isinstance(function, type)
    return inspect.getfullargspec(function.__init__ if is_link else function).args


def flat(value):
    parts = value if isinstance(value, (list, tuple)) else [value]
    return np.concatenate([np.ravel(part) for part in parts])


def results():
    found = {}
    for name, (_, call) in CASES.items():
        np.random.seed(0)
        found[name] = flat(call())
    return found


def write(path):
    found = results()
    if chainer.__version__ < '2':
        for function in SIGNATURES:
            found['signature ' + function.__name__] = np.array(arguments(function))
    np.savez_compressed(path, **found)


if __name__ == '__main__':
    warnings.simplefilter('ignore')
    write(os.path.join(sys.argv[1], chainer.__version__ + '.npz'))
