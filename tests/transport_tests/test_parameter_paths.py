"""The parameters of a model with their paths: those of Chainer's namedparams, each once."""

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainermn._transport import parameter_paths


class Own(chainer.Chain):
    """Says itself which parameters it has."""

    def namedparams(self, include_uninit=True):
        yield '/mine', self.b


class Beside(chainer.Link):
    def namedparams(self, include_uninit=True):
        yield from super().namedparams(include_uninit)
        yield '/beside', self.__dict__['more']


class ChainBeside(chainer.Chain, Beside):
    """Chainer's own method of a chain, above which there is another."""


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
    paths, parameters = parameter_paths.named_once(model)
    assert paths == tuple(path for path, _ in expected)
    assert [*map(id, parameters)] == [id(parameter) for _, parameter in expected]


@pytest.mark.parametrize('name', MODELS)
def test_are_those_of_namedparams(name):
    for _ in range(2):
        same(MODELS[name]())


def test_a_shared_parameter_has_its_first_path():
    model = chainer.Chain(b=link('x'), a=link('y', 'z'))
    with model.a.init_scope():
        model.a.z = model.b.x
    paths, parameters = parameter_paths.named_once(model)
    assert paths == ('/a/y', '/a/z')
    assert parameters[1] is model.b.x


def test_changes_are_seen():
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


def test_nothing_of_a_model_is_kept():
    import gc
    import weakref

    model = link('x')
    parameter_paths.named_once(model)
    gone = weakref.ref(model), weakref.ref(model.x)
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
