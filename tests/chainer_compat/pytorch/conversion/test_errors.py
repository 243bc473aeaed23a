"""If a conversion fails, the error gives the function, the link and the line."""

import os
import random
import traceback

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
import torch
from chainer.link_hooks import SpectralNormalization
from models_to_convert import Net, draw

import chainer_compat

pytestmark = pytest.mark.mpi_skip


class Double(chainer.FunctionNode):
    def forward(self, inputs):
        return inputs[0] * 2,


class OldDouble(chainer.Function):
    def forward(self, inputs):
        return inputs[0] * 2,


def assigned(h):
    h.array[h.array < 0] = 0
    return h


def copied_into(h):
    weights = np.zeros(h.shape, 'f')
    np.copyto(weights, h.array)
    return h * weights


def filled(h):
    weights = np.zeros(h.shape, 'f')
    weights[...] = h.array
    return h * weights


def repeated(h):
    for _ in range(int(abs(float(h.array[0, 0]))) + 1):
        h = F.tanh(h)
    return h


def gradient(h):
    g, = chainer.grad([F.sum(F.tanh(h))], [h], enable_double_backprop=True)
    return g


def unpooled(h):
    y, indexes = F.max_pooling_2d(F.reshape(h, (1, 1, 4, 5)), 2, return_indices=True)
    return F.upsampling_2d(y, indexes, 2)


#: By the name in the message.
CASES = {
    'a condition (if': lambda h: F.relu(h) if h.array.sum() > 0 else F.tanh(h),
    'a condition (if  ': lambda h: F.relu(h) if np.array(h.array).mean() > -9 else F.tanh(h),
    'a condition (if   ': lambda h: F.relu(h) if chainer.as_array(h).mean() > -9 else F.tanh(h),
    'a condition (if    ': lambda h: F.relu(h) if np.random.rand() > 1e-9 else F.tanh(h),
    'random numbers': lambda h: F.relu(h) if random.random() > 1e-9 else F.tanh(h),
    'RReLU': lambda h: F.rrelu(h, r=np.ones(h.shape, 'f')),
    'a condition (if ': lambda h: F.concat([h[i:i + 1] for i in range(4) if h.array[i, 0] > -9], 0),
    'float(...)': lambda h: h * float(F.sum(h).array),
    'float(...) ': repeated,
    'int(...)': lambda h: h[int(h.array.argmax()) % 4],
    '.item() uses': lambda h: h * F.sum(h).item(),
    '.tolist() uses': lambda h: h + h.array.tolist()[0][0],
    '.flat uses': lambda h: h * next(h.array.flat),
    'the operator in uses': lambda h: h if 0. in h.array else -h,
    'len(...) or .shape uses': lambda h: h * len(np.nonzero(h.array > 0)[0]),
    'numpy.array_equal uses': lambda h: h * np.array_equal(h.array, 1),
    'an assignment': assigned,
    'numpy.copyto': copied_into,
    'Mul': filled,
    'Mul ': lambda h: h * np.array(memoryview(h.array)),
    'Add': lambda h: h + np.cumsum(h.array, 1),
    'GetItem': lambda h: h[np.nonzero(h.array > 0)],
    'Permutate': lambda h: F.permutate(h, h.array.argsort(0)[:, 0]),
    'Upsampling2D': unpooled,
    'Double': lambda h: Double().apply((h,))[0],
    'OldDouble': lambda h: OldDouble()(h),
    'TanhGrad': gradient,
    'Pad': lambda h: F.pad(h, 1, 'symmetric'),
    'output': lambda h: np.ones(3, 'f'),
}


@pytest.mark.parametrize('what', CASES)
def test_errors(what):
    model = Net(lambda self, x: CASES[what](self.fc(x)), fc=L.Linear(5, 5))
    with pytest.raises(chainer_compat.ConversionError) as caught:
        chainer_compat.to_torch(model, draw(4, 5), train=what == 'RReLU')
    message = str(caught.value)
    assert what.strip() in message
    assert what == 'output' or ('(Net, ' in message and 'test_errors.py:' in message)


def hidden(self, x):
    """A copy by C code hides where values come from, but a second run differs."""
    return F.relu(x) if np.array(memoryview(x))[0] < -4 else F.tanh(x)


def used_before():
    model = L.LSTM(5, 4)
    model(draw(3, 5))
    return model


def counting():
    def run(self, x):
        self.count += 1
        return F.mean(F.tanh(x)) + F.mean(x ** 2) * min(self.count / 1000, 1)

    model = Net(run)
    model.count = 0
    return model


def with_mean():
    def run(self, x):
        self.mean = self.mean * .9 + x.mean(axis=0) * .1
        return F.tanh(x)

    model = Net(run)
    model.add_persistent('mean', np.zeros(5, 'f'))
    return model


def creating(link=None):
    """Return a model that creates a layer and a parameter in its first call."""
    def run(self, x):
        if self.scale is None:
            with self.init_scope():
                self.last = L.Linear(4, 3)
                self.scale = chainer.Parameter(2, (3,))
        self.history.append(len(self.history))
        self.sizes[len(x)] = x.shape
        return self.last(self.fc(x)) * self.scale

    model = Net(run, fc=link or L.Linear(5, 4))
    model.scale, model.history, model.sizes = None, [], {}
    return model


def masked(self, x):
    """The example has no padding, so a mask that lost its origin is the same in similar runs."""
    mask = np.zeros(x.shape, 'f')
    mask[...] = x != 0
    return F.embed_id(x, np.eye(9, dtype='f')) * mask[:, :, None]


def named(name):
    model = Net(lambda self, x: self[name](x))
    model.add_link(name, L.Linear(5, 4))
    return model


X = draw(4, 5)


#: By the message: a function that makes the model, its inputs, and options.
WRONG_MODELS = {
    r'Use F\.where instead of if': (
        lambda: Net(lambda self, x: F.relu(x) if x.mean() > 9 else F.tanh(x)), [X], {}),
    r'called (Tanh|ReLU) \(Net, ': (lambda: Net(hidden), [np.arange(-5, 4, dtype='f')], {}),
    r'Double \(.*; OldDouble \(': (
        lambda: Net(lambda self, x: OldDouble()(Double().apply((x,))[0])), [X], {}),
    'Reset the state of recurrent links': (used_before, [draw(3, 5)], {}),
    'between calls, such as /c, /h': (lambda: L.LSTM(5, 4), [X], {}),
    'between calls, such as /c, (?=/h)': (lambda: L.LSTM(5, 4), [X], {'train': True}),
    'between calls, such as /count': (counting, [X], {'train': True}),
    'persistent value mean by': (with_mean, [X], {'train': True}),
    'The model creates /last when': (creating, [X], {}),
    'Mul .* array that differs between two runs': (lambda: Net(masked), [np.ones((3, 4), 'i')], {}),
    'cannot have: type': (lambda: named('type'), [X], {}),
    'cannot have: class': (lambda: named('class'), [X], {}),
    'With a batch size of 1': (  # F.squeeze also removes the axis of the batch
        lambda: Net(lambda self, x: F.squeeze(self.fc(x)), fc=L.Linear(5, 1)), [X],
        {'dynamic_batch': True}),
    r'Input x1 has the type object\.': (
        lambda: Net(lambda self, x, y: F.tanh(x)), [X, object()], {}),
    'PyTorch cannot run the converted module: ValueError: Expected more than 1 value': (
        lambda: L.BatchNormalization(5, axis=0), [draw(2, 5)[:1]],
        {'train': True, 'dynamic_batch': False}),
    'returns no array': (lambda: Net(lambda self, x: None), [X], {}),
    'for all batch sizes': (lambda: Net(lambda self, x: F.reshape(x, (2, 5, 2))), [X],
                            {'dynamic_batch': True}),
}


@pytest.mark.parametrize('message', WRONG_MODELS)
@pytest.mark.filterwarnings('ignore:A batch with no more than one sample')
def test_wrong_models(message):
    make, inputs, options = WRONG_MODELS[message]
    with pytest.raises(chainer_compat.ConversionError, match=message):
        chainer_compat.to_torch(make(), *inputs, **options)


def test_models_that_create_layers():
    """An error leaves the model as it was; after one call, it can be converted."""
    model = creating()
    with pytest.raises(chainer_compat.ConversionError, match='call the model once before'):
        chainer_compat.to_torch(model, X)
    assert [path for path, _ in model.namedparams()] == ['/fc/W', '/fc/b']
    assert (model.scale, model.history, model.sizes) == (None, [], {})
    expected = model(X).array
    module = chainer_compat.to_torch(model, X)
    np.testing.assert_allclose(module(torch.from_numpy(X)).detach(), expected, rtol=1e-5)
    assert (model.history, model.sizes) == ([0], {4: (4, 5)})


@pytest.mark.parametrize('make', [
    lambda: creating(L.Linear(None, 4)),
    lambda: L.Linear(None, 4).add_hook(SpectralNormalization(use_gamma=True)),
])
def test_what_is_created_while_parameters_are_initialized(make):
    """The run that gives parameters their sizes is the first call."""
    model = make()
    module = chainer_compat.to_torch(model, X)
    with chainer.using_config('train', False):
        np.testing.assert_allclose(
            module(torch.from_numpy(X)).detach(), model(X).array, rtol=1e-5)


def test_lengths_that_were_equal_by_chance():
    model = Net(lambda self, x, y: F.matmul(x, y, transb=True) / len(y))
    module = chainer_compat.to_torch(model, draw(3, 5), draw(3, 5))
    with pytest.raises(AssertionError, match='the same batch size as the first array'):
        module(*map(torch.from_numpy, (draw(4, 5), draw(3, 5))))


def test_arguments_that_are_no_arrays():
    """They are part of the graph, so the module accepts no others."""
    model = Net(lambda self, xs, mask, scale: F.tanh(xs[0] + xs[1]['x']) * float(scale))
    x = draw(2, 3)
    module = chainer_compat.to_torch(model, [x, {'x': x}], None, np.float32(2))
    x = torch.from_numpy(x)
    module([x, {'x': x}], None, 2.)
    for arguments, message in (
            (([x, {'x': x}, x], None, 2.), r'Input x0 must have length 2'),
            (([x, {'x': x, 'y': x}], None, 2.), r'Input x0\[1\] must have length 1'),
            (([x, {'x': x}], x > 0, 2.), 'must be None'),
            (([x, {'x': x}], None, 3.), r'must be 2\.0')):
        with pytest.raises(AssertionError, match=message):
            module(*arguments)


def test_a_model_that_communicates():
    class Sent(Double):
        __module__ = 'chainermn.functions'

    model = Net(lambda self, x: Sent().apply((x,))[0])
    with pytest.raises(chainer_compat.ConversionError, match=r'Sent .*: it communicates with'):
        chainer_compat.to_torch(model, draw(2, 3))


class Fails(chainer.Chain):
    def forward(self, x):
        raise OSError('no such file')


#: Calls, and what the error says.
WRONG = [
    (lambda m, t, x: chainer_compat.to_torch(x, m), 'must be a chainer.Link, not numpy.ndarray. '
     'The order of the arguments is to_torch(model, x).'),
    (lambda m, t, x: chainer_compat.to_torch(chainer.optimizers.SGD().setup(m), x),
     'not chainer.optimizers.SGD. Pass its model, optimizer.target.'),
    (lambda m, t, x: chainer_compat.to_torch(L.Linear, x), 'class Linear. Pass an instance: Lin'),
    (lambda m, t, x: chainer_compat.to_torch(L.Classifier(m), x),
     'pass model.predictor: to_torch(model.predictor, x).'),
    (lambda m, t, x: chainer_compat.to_torch(m, torch.ones(2, 3)), 'input 0 is a torch.Tensor'),
    (lambda m, t, x: chainer_compat.to_torch(m, {'x': [torch.ones(2, 3)]}),
     "input 0['x'][0] is a torch.Tensor"),
    (lambda m, t, x: chainer_compat.to_torch(m, x.tolist()), 'instead of lists of numbers'),
    (lambda m, t, x: chainer_compat.to_torch(m), 'called with no inputs: TypeError: '),
    (lambda m, t, x: chainer_compat.to_torch(m, x[:, :2]), 'called with float32 (2, 2): '),
    (lambda m, t, x: chainer_compat.to_torch(Fails(), x), 'OSError: no such file (' + __file__),
    (lambda m, t, x: chainer_compat.to_torch(m, x, call='forward'), 'such as call=model.forward, '),
    (lambda m, t, x: chainer_compat.compare(t, m, x),
     'not torch.fx.GraphModule. The order of the arguments is compare(model, module, x).'),
    (lambda m, t, x: chainer_compat.compare(m, x, t), 'must be a torch.nn.Module, not numpy.nd'),
    (lambda m, t, x: chainer_compat.load_weights(t, m), 'load_weights: model must be'),
    (lambda m, t, x: chainer_compat.load_weights(m, x), 'its state_dict(), not numpy.ndarray'),
    (lambda m, t, x: chainer_compat.load_weights(L.Linear(3), t, 'x'), 'called with str: '),
    (lambda m, t, x: chainer_compat.to_torch_optimizer(chainer.optimizers.SGD().setup(m), m),
     'must be a torch.nn.Module, not chainer.links.Linear'),
    (lambda m, t, x: chainer_compat.to_torch_optimizer(torch.optim.Adam(t.parameters()), t),
     'must be a chainer.Optimizer, not torch.optim.Adam. ')]


@pytest.mark.parametrize('number', range(len(WRONG)))
def test_wrong_arguments(number):
    call, text = WRONG[number]
    model, x = L.Linear(3, 2), np.ones((2, 3), 'f')
    module = chainer_compat.to_torch(model, x)
    with pytest.raises(chainer_compat.ConversionError) as error:
        call(model, module, x)
    assert text in str(error.value)


@pytest.mark.parametrize('convert', [
    chainer_compat.to_torch, lambda model, x: chainer_compat.to_onnx(model, 'model.onnx', x)])
@pytest.mark.parametrize('run, frames', [
    (lambda self, x: x * float(F.sum(x).array), ['errors.py', 'models_to_convert.py',
                                                 'test_errors.py']),
    (lambda self, x: x.nothing, ['errors.py'])])
@pytest.mark.parametrize('debug', ['0', '1'])
def test_the_traceback_shows_user_code(monkeypatch, convert, run, frames, debug):
    monkeypatch.setenv('CHAINERMN_DEBUG', debug)
    with pytest.raises(chainer_compat.ConversionError) as caught:
        convert(Net(run), draw(3, 4))
    files = [os.path.basename(frame.filename)
             for frame in traceback.extract_tb(caught.value.__traceback__)]
    after = files[files.index('errors.py'):]
    assert ('convert.py' in after) if debug == '1' else (after == frames)
