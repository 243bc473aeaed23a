"""Training that moves to PyTorch and back gives the same parameters after each step."""

import copy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
import torch
from chainer import optimizers
from chainer.optimizer_hooks import (
    GradientClipping,
    GradientHardClipping,
    GradientNoise,
    Lasso,
    WeightDecay,
)
from trainings_in_torch import assert_same, train, train_in_torch

import chainer_compat
import chainermn
from chainer_compat import ConversionError

pytestmark = [pytest.mark.mpi_skip, pytest.mark.filterwarnings('ignore:In Chainer, the norm')]

KINDS = {
    'SGD': lambda: optimizers.SGD(.05),
    'MomentumSGD': lambda: optimizers.MomentumSGD(.02, .8),
    'CorrectedMomentumSGD': lambda: optimizers.CorrectedMomentumSGD(.02, .8),
    'NesterovAG': lambda: optimizers.NesterovAG(.02, .8),
    'Adam': lambda: optimizers.Adam(.01, .8, .99, eps=1e-3, eta=.7),
    'AdamW': lambda: optimizers.AdamW(.01, eps=1e-4, weight_decay_rate=.02),
    'AMSGrad': lambda: optimizers.AMSGrad(.01, eps=1e-4),
    'AdaGrad': lambda: optimizers.AdaGrad(.05),
    'AdaDelta': lambda: optimizers.AdaDelta(.9, 1e-3),
    'RMSprop': lambda: optimizers.RMSprop(.005, .9, 1e-4),
}

HOOKS = {
    'none': [],
    'decay': [lambda: WeightDecay(.03)],
    'clip': [lambda: GradientClipping(.5)],
    'clip, decay': [lambda: GradientClipping(.5), lambda: WeightDecay(.03)],
    'decay, clip': [lambda: WeightDecay(.03), lambda: GradientClipping(.5)],
    'lasso, hard clip': [lambda: Lasso(.01), lambda: GradientHardClipping(-.1, .2)],
}


class Net(chainer.Chain):
    def __init__(self, dtype):
        super().__init__()
        with self.init_scope(), chainer.using_config('dtype', np.dtype(dtype)):
            # A bias before the normalization would have no gradient but rounding.
            self.a, self.n = L.Linear(4, 6, nobias=True), L.BatchNormalization(6)
            self.b = L.Linear(6, 3)

    def forward(self, x):
        return self.b(F.tanh(self.n(self.a(x))))


def batches(dtype):
    random = np.random.RandomState(0)
    return [(random.randn(8, 4).astype(dtype), random.randint(0, 3, 8)) for _ in range(53)]


def change(model, kind):
    """Freeze a parameter, or give one a hyperparameter or hook of its own."""
    if kind == 'frozen':
        model.a.W.update_rule.enabled = False
    if kind == 'own rate':
        name = next(name for name in ('lr', 'alpha', 'rho')
                    if hasattr(model.b.W.update_rule.hyperparam, name))
        setattr(model.b.W.update_rule.hyperparam, name,
                getattr(model.b.W.update_rule.hyperparam, name) * .9)
    if kind == 'own decay':
        model.b.W.update_rule.add_hook(WeightDecay(.1))


def moved(kind, hooks, changes, dtype, n_before=3):
    np.random.seed(0)
    model = Net(dtype)
    optimizer = KINDS[kind]().setup(model)
    for make in HOOKS[hooks]:
        optimizer.add_hook(make())
    change(model, changes)
    data = batches(dtype)
    train(optimizer, data[:n_before])
    module = chainer_compat.to_torch(model, data[0][0], train=True)
    return model, optimizer, module, chainer_compat.to_torch_optimizer(optimizer, module), data


@pytest.mark.parametrize('changes', ['', 'frozen', 'own rate', 'own decay'])
@pytest.mark.parametrize('hooks', HOOKS)
@pytest.mark.parametrize('kind', KINDS)
def test_50_steps(kind, hooks, changes):
    if changes == 'frozen' and 'clip' in hooks.split(', '):
        hooks = 'lasso, hard clip'  # the norm does not include frozen parameters in PyTorch
    try:
        model, optimizer, module, new, data = moved(kind, hooks, changes, 'd')
    except ConversionError as error:
        assert changes == 'own decay' and kind in ('NesterovAG', 'AdamW')
        assert str(error).startswith('b.W: The hook WeightDecay of its update rule has no')
        return
    train(optimizer, data[3:])
    train_in_torch(module, new, data[3:])
    assert_same(model, module, 1e-10)
    assert module.get_parameter('a.W').requires_grad == (changes != 'frozen')


@pytest.mark.parametrize('kind', KINDS)
def test_in_float32_before_the_first_update_and_back(kind):
    model, optimizer, module, new, data = moved(kind, 'none', '', 'f', n_before=0)
    train_in_torch(module, new, data[:20])
    chainer_compat.load_weights(model, module)
    chainer_compat.load_torch_optimizer(optimizer, new, module)
    train(optimizer, data[20:25])
    train_in_torch(module, new, data[20:25])
    assert_same(model, module, 1e-4)


@pytest.mark.parametrize('kind', KINDS)
def test_back_in_float64(kind):
    _, _, module, new, data = moved(kind, 'none', '', 'd')
    train_in_torch(module, new, data[3:10])
    other = Net('d')
    back = KINDS[kind]().setup(other)
    chainer_compat.load_weights(other, module)
    chainer_compat.load_torch_optimizer(back, new, module)
    train(back, data[10:])
    train_in_torch(module, new, data[10:])
    assert_same(other, module, 1e-10)


def test_a_state_dict_resumes():
    _, optimizer, module, new, data = moved('Adam', 'none', '', 'd')
    train_in_torch(module, new, data[3:6])
    saved = {'module': {k: v.clone() for k, v in module.state_dict().items()},
             'optimizer': copy.deepcopy(new.state_dict())}
    other = chainer_compat.to_torch(optimizer.target, data[0][0], train=True)
    resumed = chainer_compat.to_torch_optimizer(optimizer, other)
    other.load_state_dict(saved['module'])
    resumed.load_state_dict(saved['optimizer'])
    assert resumed.param_groups[0]['t'] == 6
    train_in_torch(module, new, data[6:9])
    train_in_torch(other, resumed, data[6:9])
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_hooks_run_once_per_step():
    """Also if the script has another optimizer of the same class, with its own hooks."""
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    model, optimizer, module, new, data = moved('Adam', 'decay, clip', '', 'd')
    train(optimizer, data[3:10])
    train_in_torch(module, new, data[3:10])
    assert_same(model, module, 1e-10)


def test_the_predictor_of_a_classifier():
    np.random.seed(0)
    model = L.Classifier(Net('d'))
    optimizer = optimizers.Adam().setup(model)
    data = batches('d')[:20]
    for x, t in data[:3]:
        optimizer.update(model, x, t)
    module = chainer_compat.to_torch(model.predictor, data[0][0], train=True)
    new = chainer_compat.to_torch_optimizer(optimizer, module)
    for x, t in data[3:]:
        optimizer.update(model, x, t)
    train_in_torch(module, new, data[3:])
    assert_same(model.predictor, module, 1e-10)


class Scaled(chainer.Chain):
    """Has a parameter without axes, and one whose array is not C-contiguous."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.scale = chainer.Parameter(np.array(1.5))
            self.W = chainer.Parameter(np.asfortranarray(np.random.randn(3, 4)))

    def forward(self, x):
        return F.linear(x, self.W) * F.broadcast_to(self.scale, (len(x), 3))


@pytest.mark.parametrize('kind', ['MomentumSGD', 'Adam'])
def test_parameters_without_axes_or_in_another_order(kind):
    model = Scaled()
    optimizer, data = KINDS[kind]().setup(model), batches('d')
    train(optimizer, data[:3])
    module = chainer_compat.to_torch(model, data[0][0], train=True)
    new = chainer_compat.to_torch_optimizer(optimizer, module)
    train(optimizer, data[3:10])
    train_in_torch(module, new, data[3:10])
    assert_same(model, module, 1e-10)
    chainer_compat.load_torch_optimizer(optimizer, new, module)
    train(optimizer, data[10:15])
    train_in_torch(module, new, data[10:15])
    assert_same(model, module, 1e-10)


def test_a_multi_node_optimizer():
    model, data = Net('d'), batches('d')
    optimizer = chainermn.create_multi_node_optimizer(
        KINDS['MomentumSGD'](), chainermn.create_communicator('naive')).setup(model)
    train(optimizer, data[:4])  # the first update broadcasts
    module = chainer_compat.to_torch(model, data[0][0], train=True)
    new = chainer_compat.to_torch_optimizer(optimizer, module)
    train(optimizer, data[4:10])
    train_in_torch(module, new, data[4:10])
    assert_same(model, module, 1e-10)


def test_nothing_is_loaded_if_a_state_is_missing():
    model, optimizer, module, new, _ = moved('Adam', 'none', '', 'd')
    before = {path: (param.update_rule.t, param.update_rule.state['m'].copy())
              for path, param in model.namedparams()}
    last = new.param_groups[-1]['params'][-1]
    for state in new.state.values():
        state['step'] += 1
        state['exp_avg'] += 1
    del new.state[last]['exp_avg_sq']
    with pytest.raises(ConversionError, match="has no state 'exp_avg_sq' for"):
        chainer_compat.load_torch_optimizer(optimizer, new, module)
    for path, param in model.namedparams():
        assert param.update_rule.t == before[path][0]
        np.testing.assert_array_equal(param.update_rule.state['m'], before[path][1])


def test_parameters_of_several_links():
    model = chainer.Sequential(L.Linear(4, 4), F.tanh, L.Linear(4, 4))
    model[2].W = model[0].W
    module = chainer_compat.to_torch(model, batches('f')[0][0], train=True)
    with pytest.warns(UserWarning, match=r'1.W is a parameter of several links'):
        new = chainer_compat.to_torch_optimizer(optimizers.SGD().setup(model), module)
    assert sum(len(group['params']) for group in new.param_groups) == 3


def refused(optimizer, message, prepare=lambda model: None):
    model = Net('f')
    optimizer.setup(model)
    prepare(model)
    module = chainer_compat.to_torch(model, batches('f')[0][0], train=True)
    before = {name: p.requires_grad for name, p in module.named_parameters()}
    with pytest.raises(ConversionError, match=message):
        chainer_compat.to_torch_optimizer(optimizer, module)
    assert before == {name: p.requires_grad for name, p in module.named_parameters()}


def test_what_has_no_equivalent():
    refused(optimizers.AdaBound(), 'PyTorch has no AdaBound')
    refused(optimizers.SMORMS3(),
            'SMORMS3 has no equivalent in PyTorch. These optimizers have one: AdaDelta')
    refused(optimizers.RMSprop(eps_inside_sqrt=True), 'no RMSprop with eps_inside_sqrt')
    stopped = optimizers.MomentumSGD()

    def stop(model):
        train(stopped, batches('f')[:1])
        stopped.lr = 0

    refused(stopped, 'a.W: The learning rate is 0', stop)
    noisy = optimizers.SGD()
    refused(noisy, 'The hook GradientNoise has no equivalent',
            lambda model: noisy.add_hook(GradientNoise(.1)))
    after = optimizers.SGD()
    refused(after, 'WeightDecay runs after updates',
            lambda model: after.add_hook(WeightDecay(.1), timing='post'))
    refused(optimizers.SGD(), 'All parameters are frozen', lambda model: model.disable_update())
    with pytest.raises(ConversionError, match=r'SGD has no model. Call optimizer.setup'):
        chainer_compat.to_torch_optimizer(optimizers.SGD(), torch.nn.Linear(2, 2))
    with pytest.raises(ConversionError, match=r'not torch\.nn\.Linear\. The order of'):
        chainer_compat.to_torch_optimizer(torch.nn.Linear(2, 2), optimizers.SGD())
    with pytest.raises(ConversionError, match=r"'a.W'; its first parameters are: weight, bias"):
        chainer_compat.to_torch_optimizer(optimizers.SGD().setup(Net('f')), torch.nn.Linear(2, 2))


def test_states_of_another_kind():
    model, _, module, new, _ = moved('Adam', 'none', '', 'd')
    with pytest.raises(ConversionError, match='MomentumSGD is SGD in PyTorch, not Adam'):
        chainer_compat.load_torch_optimizer(optimizers.MomentumSGD().setup(model), new, module)


def test_the_norm_without_frozen_parameters():
    with pytest.warns(UserWarning, match='the norm of GradientClipping includes'):
        moved('SGD', 'clip', 'frozen', 'd')


def test_the_parameters_of_another_module():
    """Its state would become 0."""
    model, optimizer, module, new, data = moved('Adam', 'none', '', 'd')
    other = chainer_compat.to_torch(model, data[0][0], train=True)
    before = {path: (param.update_rule.t, param.update_rule.state['m'].copy())
              for path, param in model.namedparams()}
    with pytest.raises(ConversionError, match='does not update these parameters of the module: '):
        chainer_compat.load_torch_optimizer(optimizer, new, other)
    for path, param in model.namedparams():
        assert param.update_rule.t == before[path][0]
        np.testing.assert_array_equal(param.update_rule.state['m'], before[path][1])
    chainer_compat.load_torch_optimizer(optimizer, new, module)


def test_an_optimizer_of_pytorch():
    _, optimizer, module, new, _ = moved('Adam', 'none', '', 'd')
    for call in (lambda: chainer_compat.to_torch_optimizer(new, module),
                 lambda: chainer_compat.load_torch_optimizer(new, optimizer, module)):
        with pytest.raises(ConversionError, match=r'not torch\.optim\.Adam\. The order'):
            call()
