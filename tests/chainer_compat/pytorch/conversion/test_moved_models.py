"""Training of larger models continues in PyTorch for 50 steps, then in Chainer, in float64."""

import pathlib
import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
import torch
from chainer import optimizer_hooks, optimizers
from trainings_in_torch import assert_same

import chainer_compat

pytestmark = pytest.mark.mpi_skip

N_BEFORE, N_AFTER = 5, 50
softplus = torch.nn.functional.softplus


@pytest.fixture
def networks(monkeypatch):
    """The module with the two networks of the example dcgan."""
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[4] / 'examples' / 'dcgan'))
    import net

    yield net
    del sys.modules['net']


class Language(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.embed, self.rnn = L.EmbedID(30, 16), L.NStepLSTM(2, 16, 24, 0.)
            self.out = L.Linear(24, 5)

    def forward(self, *sequences):
        h, _, _ = self.rnn(None, None, [self.embed(x) for x in sequences])
        return self.out(h[-1])


def moved(model, optimizer, *inputs):
    module = chainer_compat.to_torch(model, *inputs, train=True)
    return module, chainer_compat.to_torch_optimizer(optimizer, module)


def back(model, optimizer, module, new):
    chainer_compat.load_weights(model, module)
    chainer_compat.load_torch_optimizer(optimizer, new, module)


def test_sequences():
    random, data = np.random.RandomState(0), []
    for _ in range(N_BEFORE + N_AFTER):
        data.append(([random.randint(0, 30, n) for n in (9, 6, 4)], random.randint(0, 5, 3)))
    with chainer.using_config('dtype', np.float64):
        model, other = Language(), Language()

    def set_up(model):
        optimizer = optimizers.Adam(.01).setup(model)
        optimizer.add_hook(optimizer_hooks.GradientClipping(1.))
        return optimizer

    def step(model, optimizer, xs, t):
        optimizer.update(lambda: F.softmax_cross_entropy(model(*xs), t))

    def step_in_torch(xs, t):
        new.zero_grad()
        y = module(*map(torch.tensor, xs))
        torch.nn.functional.cross_entropy(y, torch.tensor(t)).backward()
        new.step()

    optimizer = set_up(model)
    for xs, t in data[:N_BEFORE]:
        step(model, optimizer, xs, t)
    module, new = moved(model, optimizer, *data[0][0])
    for xs, t in data[N_BEFORE:]:
        step(model, optimizer, xs, t)
        step_in_torch(xs, t)
    assert_same(model, module, 1e-10)
    optimizer = set_up(other)
    back(other, optimizer, module, new)
    for xs, t in data:
        step(other, optimizer, xs, t)
        step_in_torch(xs, t)
    assert_same(other, module, 1e-10)


class Adversaries:
    """Two networks with two optimizers, in Chainer and in PyTorch."""

    def __init__(self, net):
        with chainer.using_config('dtype', np.float64):
            self.models = net.Generator(10, 3, 16, 8), net.Discriminator(3, 8)
            self.models[1](np.zeros((1, 3, 16, 16)))
        self.optimizers = [optimizers.Adam(2e-3, .5).setup(model) for model in self.models]
        for optimizer in self.optimizers:
            optimizer.add_hook(optimizer_hooks.WeightDecay(1e-4))

    def step(self, x, z):
        generator, discriminator = self.models
        drawn = generator(z)
        self.optimizers[1].update(lambda: F.mean(F.softplus(-discriminator(x))) + F.mean(
            F.softplus(discriminator(drawn.array))))
        self.optimizers[0].update(lambda: F.mean(F.softplus(-discriminator(drawn))))

    def move(self, *inputs):
        self.modules, self.new = zip(*(
            moved(model, optimizer, x) for model, optimizer, x in zip(
                self.models, self.optimizers, inputs, strict=True)), strict=True)

    def step_in_torch(self, x, z):
        generator, discriminator = self.modules
        x, drawn = torch.tensor(x), generator(torch.tensor(z))
        self.new[1].zero_grad()
        (softplus(-discriminator(x)).mean()
         + softplus(discriminator(drawn.detach())).mean()).backward()
        self.new[1].step()
        self.new[0].zero_grad()
        softplus(-discriminator(drawn)).mean().backward()
        self.new[0].step()

    def check(self, models):
        for model, module in zip(models, self.modules, strict=True):
            assert_same(model, module, 1e-10)


def test_two_optimizers(networks):
    random = np.random.RandomState(0)
    data = [(random.rand(8, 3, 16, 16), random.uniform(-1, 1, (8, 10)))
            for _ in range(N_BEFORE + N_AFTER)]
    both = Adversaries(networks)
    for batch in data[:N_BEFORE]:
        both.step(*batch)
    both.move(data[0][1], data[0][0])
    for batch in data[N_BEFORE:]:
        both.step(*batch)
        both.step_in_torch(*batch)
    both.check(both.models)
    returned = Adversaries(networks)
    for each in zip(returned.models, returned.optimizers, both.modules, both.new, strict=True):
        back(*each)
    for batch in data:
        returned.step(*batch)
        both.step_in_torch(*batch)
    both.check(returned.models)
