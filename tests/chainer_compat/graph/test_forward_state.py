"""A forward pass that is repeated computes the same, and one that is undone leaves no trace."""

import collections
import random

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer.link_hooks import SpectralNormalization

from chainer_compat.graph import forward_state
from chainer_compat.graph.forward_state import ForwardState

pytestmark = pytest.mark.mpi_skip


class Changing(chainer.Chain):
    """Each call changes every attribute, and returns what it read."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.fc = L.Linear(2, 2).add_hook(SpectralNormalization())
        self.array, self.n, self.h = np.zeros(3), 0, chainer.Variable(np.zeros(1))
        self.list, self.set, self.dict = [np.ones(2)], {1}, {'a': [1]}
        self.queue = collections.deque([1, 2], maxlen=2)
        self.other = [L.Linear(1, 1)]  # no child
        self.generators = (np.random.RandomState(1), np.random.default_rng(1), random.Random(1))
        self.constant = np.arange(3.)
        self.constant.flags.writeable = False

    def read(self):
        return repr([{name: value for name, value in vars(link).items() if name != 'other'}
                     for link in [*self.links(), *self.other]])

    def forward(self):
        drawn = [np.random.rand(), random.random(), self.generators[0].rand(),
                 self.generators[1].random(), self.generators[2].random()]
        y = self.fc(np.ones((1, 2), 'f')).array.tolist()
        result = self.read(), drawn, y
        self.array += 1
        self.n += 1
        self.h.array[...] += 1
        self.h = chainer.Variable(self.h.array + 1)
        self.list[0] *= 2
        self.list.append(self.n)
        self.set.add(self.n + 1)
        self.dict['a'].append(2)
        self.dict[self.n] = 3
        self.queue.append(self.n)
        self.other[0].counter = self.n
        self.new = self.n
        return result


@pytest.mark.parametrize('large', [2**20, 0], ids=['copied', 'compared'])
def test_again(monkeypatch, large):
    monkeypatch.setattr(forward_state, '_LARGE', large)
    model = Changing()
    model()
    states, expected = [], []
    for _ in range(3):
        states.append(ForwardState([model], *states[-1:]))
        expected.append(model())
    now = states[-1].again()
    for n in (1, 0, 2, 1):
        states[n].restore()
        assert model() == expected[n]
    now.restore()
    assert model.n == 4
    continued = model()
    states[2].restore()
    assert [model(), model()] == [expected[2], continued]


def test_equal_large_arrays_are_copied_once(monkeypatch):
    monkeypatch.setattr(forward_state, '_LARGE', 8)
    link = chainer.Link()
    link.x = np.array([np.nan, -0.])
    first = ForwardState([link])
    second = ForwardState([link], first)
    assert first._arrays == second._arrays  # the same objects
    link.x[1] = 0.
    third = ForwardState([link], second)
    first.restore()
    assert np.signbit(link.x[1])
    third.restore()
    assert not np.signbit(link.x[1])


def test_new_parameters():
    link = chainer.Chain()
    before = ForwardState([link])
    with link.init_scope():
        link.fc = child = L.Linear(2, 2)
    link.other = 1
    before.restore(keep_new_parameters=True)
    assert [*link.children()] == [child]
    assert not hasattr(link, 'other')
    before.restore()
    assert not [*link.children()]
    assert not hasattr(link, 'fc')
