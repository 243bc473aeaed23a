"""Parameters are those that ``params`` yields, in its order, or it is called."""

import gc
import weakref

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainer_compat.graph import link_parameters

pytestmark = pytest.mark.mpi_skip


class Mixed(chainer.Chain):
    def __init__(self):
        super().__init__()
        shared = L.Linear(2, 2)
        with self.init_scope():
            self.z = chainer.Parameter(np.zeros(1, 'f'))
            self.a = chainer.Parameter()
            self.late = L.Linear(None, 3)
            self.list = chainer.ChainList(shared, L.Linear(2, 3), Own())
            self.again = shared
            self.empty = chainer.Chain()


class Own(chainer.Link):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(np.zeros(2, 'f'))


class Both(Own, chainer.ChainList):
    """``Own`` is before ``ChainList`` in the order of classes, but has no method."""


class Frozen(chainer.Chain):
    def params(self, include_uninit=True):
        return (x for x in super().params(include_uninit) if x.name != 'b')


class Hidden(chainer.Chain):
    def namedparams(self, include_uninit=True):
        return (x for x in super().namedparams(include_uninit) if x[0] != '/l/b')


class Between(chainer.Link):
    def params(self, include_uninit=True):
        yield chainer.Parameter(np.ones(1, 'f'))
        yield from super().params(include_uninit)


class Inherits(chainer.Chain, Between):
    pass


MODELS = {
    'link': lambda: L.Linear(2, 3), 'no bias': lambda: L.Linear(2, 3, nobias=True),
    'mixed': Mixed, 'sequential': lambda: chainer.Sequential(L.Linear(2, 3), Mixed()),
    'repeated': lambda: chainer.Sequential(L.Linear(2, 2)).repeat(3, mode='share'),
    'both': Both, 'empty': chainer.ChainList,
}
OWN_METHODS = {
    'params': lambda: Frozen(l=L.Linear(2, 2)), 'namedparams': lambda: Hidden(l=L.Linear(2, 2)),
    'inside': lambda: chainer.Chain(x=L.Linear(1, 1), y=chainer.Sequential(
        Frozen(l=L.Linear(2, 2)))),
    'between': lambda: Inherits(l=L.Linear(2, 2)),
}


@pytest.mark.parametrize('name', MODELS)
def test_those_of_chainer(name):
    model = MODELS[name]()
    found = link_parameters.parameters(model)
    assert [*map(id, found)] == [*map(id, model.params())]
    if name == 'mixed':
        model.late(np.ones((1, 4), 'f'))
        model.list.append(L.Linear(4, 4))
        with model.init_scope():
            model.b = chainer.Parameter(np.ones(2, 'f'))
        del model.empty
        found = link_parameters.parameters(model)
        assert [*map(id, found)] == [*map(id, model.params())]


@pytest.mark.parametrize('name', OWN_METHODS)
def test_methods_of_a_class(name):
    assert link_parameters.parameters(OWN_METHODS[name]()) is None


@pytest.mark.parametrize('method', ['params', 'namedparams'])
def test_methods_of_an_object(method):
    model = Mixed()
    setattr(model.again, method, lambda include_uninit=True: iter([]))
    assert link_parameters.parameters(model) is None


@pytest.mark.parametrize('method', ['params', 'namedparams'])
@pytest.mark.parametrize('cls', [chainer.Link, chainer.Chain, chainer.ChainList])
def test_replaced_methods_of_chainer(cls, method, monkeypatch):
    original = getattr(cls, method)
    monkeypatch.setattr(cls, method, lambda self, *args, **kwargs: original(self, *args, **kwargs))
    assert link_parameters.parameters(Mixed()) is None
    monkeypatch.undo()
    assert link_parameters.parameters(Mixed()) is not None


@pytest.mark.parametrize('has_own', [False, True])
def test_classes_are_freed(has_own):
    """Their methods may refer to a dataset."""
    class Mine(chainer.Chain):
        def own(self, include_uninit=True):
            return super().params(include_uninit)

        if has_own:
            params = own

    assert link_parameters.parameters(Mine()) == (None if has_own else [])
    freed = weakref.ref(Mine)
    del Mine
    gc.collect()
    assert freed() is None
