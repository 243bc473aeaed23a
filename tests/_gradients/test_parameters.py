"""The parameters of a model: sorted by path, each once, with a description."""

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainermn._gradients import parameters
from chainermn._gradients.parameters import Layout, ParameterList

pytestmark = pytest.mark.mpi_skip


@pytest.fixture
def model():
    model = chainer.Chain(b=L.Linear(3, 2), a=L.Linear(3, 2), lazy=L.Linear(None, 2, nobias=True))
    with model.a.init_scope():
        model.a.W = model.b.W
    model.cleargrads()
    return model


def test_parameters(model):
    arrays = ParameterList.of_model(model, 'data')
    assert list(arrays.paths) == ['/a/W', '/a/b', '/b/b']  # /b/W is /a/W, and lazy has none yet
    assert arrays.by_path()['/a/W'] is model.b.W.array
    assert ParameterList.of_model(model, 'grad') == []
    model.b.W.grad = np.ones((2, 3), np.float32)
    assert list(ParameterList.of_model(model, 'grad').paths) == ['/a/W']
    arrays = ParameterList.of_model(model, 'grad', zero_fill=True)
    assert list(arrays.paths) == ['/a/W', '/a/b', '/b/b']
    assert arrays.by_path()['/a/W'] is model.a.W.grad
    assert (arrays.by_path()['/a/W'] == 1).all()
    assert arrays.by_path()['/b/b'] is model.b.b.grad
    assert (arrays.by_path()['/b/b'] == 0).all()


def test_a_proxy_of_a_model(model):
    class Proxy:
        def __getattr__(self, name):
            return getattr(model, name)

    arrays = ParameterList.of_model(Proxy(), 'data')
    assert arrays.by_path().keys() == ParameterList.of_model(model, 'data').by_path().keys()
    assert arrays.by_path()['/b/b'] is model.b.b.array
    with pytest.raises(TypeError, match='expected a model'):
        ParameterList.of_model(object(), 'data')


def test_invalid_parameters_are_named(model):
    with pytest.raises(TypeError, match='expected a model'):
        ParameterList.of_model(np.zeros(3), 'data')
    link = chainer.Link()
    with link.init_scope():
        link.n = chainer.Parameter(np.zeros(3, np.int32))
        link.m = chainer.Parameter(np.zeros(3, np.longdouble))
    link.n.grad = np.zeros(3, np.int32)
    with pytest.raises(TypeError, match=f'parameter /m: arrays of dtype {link.m.dtype} cannot'):
        ParameterList.of_model(link, 'data')
    link.m.array = np.zeros(3)
    assert list(ParameterList.of_model(link, 'data').paths) == ['/m', '/n']
    with pytest.raises(TypeError, match='parameter /n: gradients of dtype int32 cannot be'):
        ParameterList.of_model(link, 'grad')


def link_with(attribute, array):
    link = chainer.Link()
    with link.init_scope():
        link.w = chainer.Parameter(np.zeros(3, np.float32))
    setattr(link.w, attribute, array)
    return link


def test_read_only_parameters_raise():
    link = link_with('data', np.broadcast_to(np.float32(1), 3))
    with pytest.raises(ValueError, match='/w: its array is read-only'):
        ParameterList.of_model(link, 'data')


def test_read_only_gradients_become_writable():
    """A backward pass may produce one: the gradient of a sum is a broadcast scalar."""
    gradient = np.broadcast_to(np.float32(1), 3)
    link = link_with('grad', gradient)
    found, = ParameterList.of_model(link, 'grad')
    assert found is link.w.grad and found.flags.writeable
    np.testing.assert_array_equal(found, gradient)


def test_fast_path_for_one_dtype():
    link = chainer.Link()
    with link.init_scope():
        link.a = chainer.Parameter(np.zeros((2, 3), np.float32))
        link.b = chainer.Parameter(np.zeros(4, np.float32))
        link.lazy = chainer.Parameter()
    link.cleargrads()
    for zero_fill in (False, True):
        if not zero_fill:
            link.a.grad = np.ones((2, 3), np.float32)
        arrays = ParameterList.of_model(link, 'grad', zero_fill)
        assert list(arrays.paths) == (['/a', '/b'] if zero_fill else ['/a'])
    link.lazy.initialize(2)
    link.lazy.grad = np.ones(2, np.float32)
    arrays = ParameterList.of_model(link, 'grad')
    assert arrays.layout(True).described == {
        '/a': 'float32 (2, 3)', '/b': 'float32 (4,)', '/lazy': 'float32 (2,)'}
    (group, results), = arrays.by_dtype()
    assert group is results is arrays
    assert group.shapes == ((2, 3), (4,), (2,))
    link.b.grad = link.b.grad.reshape(4)  # another array
    assert ParameterList.of_model(link, 'grad')[1] is link.b.grad
    link.b.array = np.zeros(5, np.float64)
    link.b.grad = np.zeros(5, np.float64)
    arrays = ParameterList.of_model(link, 'grad')
    assert arrays.layout(True).described == {
        '/a': 'float32 (2, 3)', '/b': 'float64 (5,)', '/lazy': 'float32 (2,)'}
    assert [group.shapes for group, _ in arrays.by_dtype()] == [
        ((2, 3), (2,)), ((5,),)]


def test_layout():
    arrays = ParameterList.named({'a': np.zeros((2, 3), 'f4'), 'b': np.zeros(1, 'f8')})
    layout = arrays.layout(allows_mixed_devices=True)
    assert layout.described == {'a': 'float32 (2, 3)', 'b': 'float64 (1,)'}
    assert layout == Layout.of(layout.described) == arrays.layout(allows_mixed_devices=False)
    others = [{'b': arrays[0], 'a': arrays[1]}, {'a': arrays[0]}, {'a': arrays[0], 'c': arrays[1]}]
    assert layout.digest not in {ParameterList.named(other).layout(True).digest for other in others}


class Own(chainer.Chain):
    """Defines its own namedparams."""

    def namedparams(self, include_uninit=True):
        yield '/mine', self.b


class Beside(chainer.Link):
    def namedparams(self, include_uninit=True):
        yield from super().namedparams(include_uninit)
        yield '/beside', self.__dict__['more']


class ChainBeside(chainer.Chain, Beside):
    """Chain.namedparams, with another base class that overrides it."""


def link(*names):
    made = chainer.Link()
    add(made, *names)
    return made


def add(made, *names):
    with made.init_scope():
        for name in names:
            setattr(made, name, chainer.Parameter(np.zeros(2, np.float32)))


def own():
    made = Own(child=link('x'))
    add(made, 'a', 'b')
    return made


def beside():
    made = ChainBeside(child=link('x'))
    made.more = chainer.Parameter(np.zeros(3))
    return made


MODELS = {
    'nothing': chainer.Chain,
    'link': lambda: link('b', 'a', 'B'),
    'chain': lambda: chainer.Chain(b=link('y', 'x'), a=chainer.Chain(c=link('z')), ab=link('x')),
    'sorted otherwise than walked': lambda: chainer.Chain(**{'a': link('x'), 'a0': link('x'),
                                                             'a-': link('x')}),
    'more than ten': lambda: chainer.ChainList(*[link('x', 'y') for _ in range(12)]),
    'sequential': lambda: chainer.Sequential(L.Linear(2, 3), chainer.functions.relu, L.Linear(3)),
    'own paths': lambda: chainer.Chain(a=own(), b=link('x')),
    'own paths above': lambda: chainer.ChainList(beside(), link('x')),
}


def same(model):
    expected = sorted(model.namedparams(), key=lambda named: named[0])
    paths, found = parameters.sorted_parameters(model)
    assert paths == tuple(path for path, _ in expected)
    assert [*map(id, found)] == [id(parameter) for _, parameter in expected]


@pytest.mark.parametrize('name', MODELS)
def test_equals_namedparams(name):
    for _ in range(2):
        same(MODELS[name]())


def test_a_shared_parameter_has_its_first_path():
    model = chainer.Chain(b=link('x'), a=link('y', 'z'))
    with model.a.init_scope():
        model.a.z = model.b.x
    paths, found = parameters.sorted_parameters(model)
    assert paths == ('/a/y', '/a/z')
    assert found[1] is model.b.x


def test_changes_of_the_model():
    model = chainer.Chain(a=link('x'), b=chainer.ChainList(link('y')))
    same(model)
    add(model.a, 'x')  # another parameter of that name
    same(model)
    add(model.a, 'w')
    same(model)
    delattr(model.a, 'x')
    same(model)
    model.b.append(link('z'))
    same(model)
    model.b[0] = link('y')
    same(model)
    del model.a
    same(model)
    with model.init_scope():
        model.c = L.Linear(2)
    same(model)
    one = link('x').x
    model.b.namedparams = lambda include_uninit=True: iter([('/one', one)])
    same(model)


def test_model_is_not_kept_alive():
    import gc
    import weakref

    model = link('x')
    parameters.sorted_parameters(model)
    gone = weakref.ref(model), weakref.ref(model.x)
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize('is_fast', [True, False])
def test_gradients_of_one_array_are_separated(is_fast):
    """Backward of a + b gives both the same array, and reshaping gives views of it."""
    link = chainer.Link()
    with link.init_scope():
        for name in 'abcd':
            setattr(link, name, chainer.Parameter(np.ones((2, 3), 'f')))
        if not is_fast:
            link.lazy = chainer.Parameter(chainer.initializers.Zero())
    with chainer.using_config('use_torch', 'never'):  # PyTorch's gradients share no memory
        y = link.a + link.b + chainer.functions.reshape(
            chainer.functions.reshape(link.c, (3, 2)) * 1, (2, 3)) + link.d
        chainer.functions.sum(y * np.arange(6, dtype='f').reshape(2, 3)).backward()
    assert np.shares_memory(link.a.grad, link.b.grad)  # otherwise this tests nothing
    arrays = ParameterList.of_model(link, 'grad')
    for path, array in arrays.by_path().items():
        assert array is getattr(link, path[1:]).grad
        np.testing.assert_array_equal(array, np.arange(6).reshape(2, 3))
        array *= 2
        for other in arrays:
            assert other is array or not np.shares_memory(other, array)
