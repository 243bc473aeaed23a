"""Attributes of Chainer 1 to 6: set by classes of programs, read by programs; values by hand."""

import pickle
import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.backends import _cpu
from chainer.links.model.vision import googlenet, resnet, vgg
from chainer.utils import type_check

pytestmark = pytest.mark.mpi_skip


def variable(*shape):
    return chainer.Variable(np.ones(shape, 'f'))


class Mean(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(0, (3,))

    def forward(self, x):
        return F.sum(self.w * x)


def updater(cls, *args, **kwargs):
    iterator = chainer.iterators.SerialIterator(np.ones((4, 3), 'f'), 2)
    return cls(iterator, chainer.optimizers.SGD(1).setup(Mean()), *args, **kwargs)


class SetAfter(chainer.training.updaters.StandardUpdater):
    """As programs of Chainer 1 to 6: the constructor of Chainer does not get the device."""

    def __init__(self, iterator, optimizer, device, **kwargs):
        super().__init__(iterator, optimizer, **kwargs)
        self.device = device


class SetAlone(chainer.training.updaters.StandardUpdater):
    """Does not call the constructor of Chainer."""

    def __init__(self, iterator, optimizer, device):
        self._iterators = {'main': iterator}
        self._optimizers = {'main': optimizer}
        self.converter = chainer.dataset.concat_examples
        self.device = device
        self.loss_func = None
        self.iteration = 0
        self.auto_new_epoch = True


@pytest.mark.parametrize('device', [-1, '@numpy', None])
@pytest.mark.parametrize('cls', [SetAfter, SetAlone])
def test_device_of_an_updater(cls, device):
    with pytest.warns(DeprecationWarning, match='device has been read-only since Chainer 7'):
        u = updater(cls, device)
    u.update()
    assert u.device is device
    np.testing.assert_array_equal(u.get_optimizer('main').target.w.array, [-2, -2, -2])
    expected = None if device is None else _cpu.CpuDevice()
    assert u.input_device == expected


def test_device_of_the_input():
    with pytest.warns(DeprecationWarning):
        assert updater(SetAfter, None, input_device=-1).input_device == _cpu.CpuDevice()
    assert updater(chainer.training.updaters.StandardUpdater, device=-1).device == _cpu.CpuDevice()
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match='Device specifiers'):
        updater(SetAfter, '@none')


class Pairs(chainer.iterators.SerialIterator):
    """Defines the next batch, as Chainer 5 did: from attributes that it sets."""

    def __next__(self):
        i, n = self.current_position, len(self.dataset)
        batch = [self.dataset[index] for index in self._order[i:i + 2]]
        self.is_new_epoch = i + 2 >= n
        if self.is_new_epoch:
            self.epoch += 1
            self._order = self._order[::-1]
        self.current_position = (i + 2) % n
        return batch

    next = __next__


@pytest.mark.filterwarnings('ignore:.*since Chainer 6:DeprecationWarning')
def test_position_of_an_iterator():
    np.random.seed(0)
    first = np.random.RandomState(0).permutation(4).tolist()
    iterator = Pairs([0, 1, 2, 3], 2)
    assert [iterator.next(), iterator.next()] == [first[:2], first[2:]]
    assert (iterator.epoch, iterator.is_new_epoch, iterator.epoch_detail) == (1, True, 1)
    assert iterator.next() == first[:1:-1]
    assert (iterator.epoch, iterator.is_new_epoch, iterator.epoch_detail) == (1, False, 1.5)

    saved = chainer.serializers.DictionarySerializer()
    iterator.serialize(saved)
    loaded = Pairs([0, 1, 2, 3], 2)
    loaded.serialize(chainer.serializers.NpzDeserializer(saved.target))
    assert loaded.next() == iterator.next() == first[1::-1]
    assert loaded.epoch == 2


@pytest.mark.parametrize('cls', [
    chainer.iterators.SerialIterator, chainer.iterators.MultithreadIterator,
    chainer.iterators.MultiprocessIterator])
def test_an_iterator_that_begins_again(cls):
    iterator = cls([0, 1, 2, 3], 2, shuffle=False)
    assert iterator.next() == [0, 1]
    for name, value in ('epoch', 7), ('current_position', 0), ('is_new_epoch', True):
        with pytest.warns(DeprecationWarning, match=f'{name} has been read-only since Chainer 6'):
            setattr(iterator, name, value)
        assert getattr(iterator, name) == value
    assert iterator._order is None
    iterator.finalize()


def test_an_iterator_without_a_constructor():
    class Alone(chainer.iterators.SerialIterator):
        def __init__(self):
            self.epoch = 2

    with pytest.warns(DeprecationWarning):
        iterator = Alone()
    assert (iterator.epoch, iterator.current_position, iterator.is_new_epoch) == (2, 0, False)


@pytest.mark.parametrize(('base', 'now'), [
    (googlenet.GoogLeNet, 'conv1'), (resnet.ResNetLayers, 'conv1'), (vgg.VGG16Layers, 'conv1_1'),
    (vgg.VGG19Layers, 'conv1_1')])
def test_functions_of_a_vision_model(base, now):
    class Doubled(base):
        def __init__(self):
            chainer.Chain.__init__(self)
            self.functions = {'doubled': [lambda x: 2 * x]}

    with pytest.warns(DeprecationWarning, match='functions has been read-only since Chainer 2'):
        model = Doubled()
    assert model.available_layers == ['doubled']
    assert model(variable(2, 3), layers=['doubled'])['doubled'].array.tolist() == [[2] * 3] * 2
    assert base.functions.__get__(type('Anything', (), {'__getattr__': lambda *_: 0})())[now]


def test_patients():
    trigger = chainer.training.triggers.EarlyStoppingTrigger(patience=3)
    with pytest.warns(DeprecationWarning, match='use patience'):
        assert trigger.patients == 3
    with pytest.warns(DeprecationWarning):
        trigger.patients = 4
    assert trigger.patience == 4


def test_nodes_of_the_graph():
    x = variable(2, 3)
    y = F.sum(F.relu(F.sigmoid(x)))
    node = y.creator.inputs[0]
    with pytest.warns(DeprecationWarning, match=r'get_variable\(\)\.volatile'):
        assert node.volatile == 'off'
    with pytest.warns(DeprecationWarning):
        assert (node.size, node.ndim) == (6, 2)
    with pytest.warns(DeprecationWarning):
        node.unchain_backward()
    assert node.creator is None
    y.backward()
    assert x.grad is None


def test_functions_of_a_hook():
    with chainer.function_hooks.TimerHook() as hook:
        F.relu(variable(2))
    (function, seconds), = hook.call_history
    assert function == 'ReLU'
    assert seconds >= 0
    with pytest.warns(DeprecationWarning, match='hooks store the names of functions'):
        assert function.label == 'ReLU'
    assert [*hook.summary()] == ['ReLU']


def test_an_extension_is_not_invoked_before_training():
    class Mine(chainer.training.Extension):
        pass

    assert Mine().invoke_before_training is False
    with pytest.raises(AttributeError, match='anything'):
        _ = Mine().anything


@pytest.mark.parametrize(('link', 'names'), [
    (lambda **kw: L.Convolution2D(3, 2, 3, **kw), ['use_cudnn', 'deterministic']),
    (lambda **kw: L.Deconvolution2D(3, 2, 3, **kw), ['use_cudnn', 'deterministic']),
    (lambda **kw: L.DilatedConvolution2D(3, 2, 3, **kw), ['use_cudnn']),
    (lambda **kw: L.ConvolutionND(2, 3, 2, 3, **kw), ['use_cudnn']),
    (lambda **kw: L.DeconvolutionND(2, 3, 2, 3, **kw), ['use_cudnn']),
    (lambda **kw: L.BatchNormalization(3, **kw), ['use_cudnn']),
    (lambda **kw: L.NStepLSTM(1, 3, 2, 0, **kw), ['use_cudnn'])])
@pytest.mark.filterwarnings('ignore:.* Chainer 1:DeprecationWarning')
def test_cudnn_attributes(link, names):
    for name in names:
        default = name == 'use_cudnn'
        assert getattr(link(), name) is default
        assert getattr(link(**{name: not default}), name) is not default
        new = link()
        for value in not default, default:
            setattr(new, name, value)
            assert getattr(new, name) is value
            assert getattr(pickle.loads(pickle.dumps(new)), name) is value


def test_a_convolution_with_its_attributes():
    class Mine(L.Convolution2D):
        def forward(self, x):
            seen.append(chainer.config.use_cudnn)
            return F.convolution_2d(x, self.W, self.b, self.stride, self.pad, self.use_cudnn,
                                    deterministic=self.deterministic)

    seen, x = [], variable(1, 1, 4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('default')
        mine = Mine(1, 1, 3, initialW=1, use_cudnn=False)
        assert [mine(x).array.tolist() for _ in range(2)] == [[[[[9, 9], [9, 9]]]]] * 2
        mine.use_cudnn = True
        mine(x)
    assert seen == ['never', 'never', 'auto']
    assert {str(w.message).partition(':')[0] for w in caught} == {
        'Mine(use_cudnn=...) belongs to the Chainer 1 API',
        'convolution_2d(use_cudnn=...) belongs to the Chainer 1 API',
        'convolution_2d(deterministic=...) belongs to the Chainer 1 API',
        'use_cudnn is an attribute of Chainer 1', 'deterministic is an attribute of Chainer 1'}


def test_variables_in_sets():
    x, y = variable(2), variable(2)
    with pytest.warns(DeprecationWarning, match='use id'):
        found = {x: 'x', y: 'y'}
    with pytest.warns(DeprecationWarning):
        assert (found[x], found[y]) == ('x', 'y')
    with pytest.warns(DeprecationWarning):
        assert len({*L.Linear(2, 3).params()}) == 2


@pytest.mark.parametrize('function', [chainer.Function, chainer.FunctionNode])
def test_type_checks_can_be_turned_off(function):
    class Checked(function):
        def check_type_forward(self, in_types):
            type_check.expect(in_types[0].ndim == 1)

        def forward(self, xs):
            return xs

    def call():
        f = Checked()
        return f.apply((x,)) if function is chainer.FunctionNode else f(x)

    x = variable(2, 3)
    with pytest.raises(type_check.InvalidType, match='ndim == 1'):
        call()
    before = chainer.Function.type_check_enable
    for owner in Checked, chainer.Function:
        owner.type_check_enable = False
        try:
            with pytest.warns(DeprecationWarning, match="using_config\\('type_check', False\\)"):
                call()
        finally:
            owner.type_check_enable = before
    with pytest.raises(type_check.InvalidType):
        call()


def test_the_module_of_a_renamed_function():
    from chainer.functions.math.squared_difference import squared_difference

    assert squared_difference is F.squared_difference


def test_initial_weights_of_a_parameter():
    with pytest.warns(DeprecationWarning, match='an initializer'):
        init = chainer.initializers.init_weight
    parameter = chainer.Parameter(0, (2,))
    init(parameter, chainer.initializers.Constant(3), 2)
    assert parameter.array.tolist() == [6, 6]
