"""Optimizer settings that differ between ranks raise an error within one update."""

import types
import warnings

import chainer
import numpy as np
import pytest
from chainer import links as L
from chainer import optimizer_hooks, optimizers
from each_case import each_case
from shared_fixtures import communicators

import chainermn
from chainermn.optimizers._optimizer_settings import OptimizerSettings

pytestmark = pytest.mark.filterwarnings('ignore:.*multi_node_snapshot:DeprecationWarning')

comm = communicators('flat')


def prepared(comm, actual=None, model=None, **options):
    actual = optimizers.MomentumSGD(lr=0.1) if actual is None else actual
    model = chainer.Sequential(L.Linear(2, 2), L.Linear(2, 2)) if model is None else model
    return chainermn.create_multi_node_optimizer(actual, comm, **options).setup(model)


def update(optimizer, times=1):
    x = np.ones((1, 2), optimizer.target[0].W.dtype)
    for _ in range(times):
        optimizer.update(lambda: chainer.functions.sum(optimizer.target(x)))


def hook(optimizer):
    pass


def load(optimizer):
    saved = chainer.serializers.DictionarySerializer()
    saved.save(optimizer)
    saved.target['t'] = np.array(40)
    chainer.serializers.NpzDeserializer(saved.target).load(optimizer)


def without_rule(optimizer):
    optimizer.target[1].b.update_rule = None


#: A change on rank 0 only, and what the error says of it.
CHANGES = [
    (lambda o: setattr(o, 'lr', 0.05), 'lr: 0.05 on rank 0; 0.1 on rank'),
    (lambda o: setattr(o.hyperparam, 'lr', np.float32(0.5)), 'lr: 0.5 on rank 0; 0.1 on rank'),
    (lambda o: setattr(o, 'momentum', 0), 'momentum: 0 on rank 0; 0.9 on rank'),
    (lambda o: setattr(o, 'lr', float('nan')), 'lr: nan on rank 0; 0.1 on rank'),
    (lambda o: setattr(o, 't', o.t + 3), 't: 4 on rank 0; 1 on rank'),
    (load, 't: 40 on rank 0; 1 on rank'),
    (lambda o: setattr(o.hyperparam, 'scales', (1, 2)), 'scales: [1, 2] on rank 0; nothing on'),
    (lambda o: setattr(o, 'lr', -1), 'lr: -1 on rank 0; 0.1 on rank'),
    (lambda o: o.add_hook(optimizer_hooks.Lasso(0.1), 'reg', 'post'),
     'hooks after updates: reg: Lasso(rate=0.1) on rank 0; none on'),
    (lambda o: o.target[0].W.update_rule.add_hook(optimizer_hooks.WeightDecay(0.5)),
     'update of /0/W: enabled, hook WeightDecay(rate=0.5) on rank 0; enabled on rank'),
    (without_rule, 'update of /1/b: no Chainer update rule on rank 0; enabled on rank'),
    (lambda o: setattr(o.target[1].b, 'update_rule', optimizers.sgd.SGDRule(o.hyperparam)),
     'update rules: MomentumSGDRule, SGDRule on rank 0; MomentumSGDRule on rank'),
    (lambda o: o.add_hook(optimizer_hooks.WeightDecay(0.1)), 'hooks: WeightDecay(rate=0.1) on'),
    (lambda o: o.target[1].disable_update(), 'update of /1/W: disabled on rank 0; enabled on rank'),
    (lambda o: setattr(o.target[1].b.update_rule.hyperparam, 'lr', 1.),
     'update of /1/b: enabled, lr 1.0 on rank 0; enabled on rank'),
    (lambda o: o.set_loss_scale(2.), 'loss scale: 2.0 on rank 0; None on rank'),
    (lambda o: o.use_fp32_update(), 'use_fp32_update: True on rank 0; False on rank'),
    (lambda o: setattr(o.hyperparam, 'other', None), 'other: None on rank 0; nothing on rank'),
    (lambda o: setattr(o, 't', np.int64(40)), 't: 40 on rank 0; 1 on rank'),
]


@pytest.mark.mpi(min_size=2)
@each_case('options, number, n_before', [
    ([{}, {'overlap': 'always'}, {'compression': 'fp16'}][number % 3], number,
     0 if number % 3 == 0 and not text.startswith('t: ') else 2)
    for number, (_, text) in enumerate(CHANGES)])
def test_a_change_on_one_rank(comm, same_error, options, number, n_before):
    """Also before the first update, which only broadcasts."""
    change, text = CHANGES[number]
    optimizer = prepared(comm, **options)
    update(optimizer, n_before)
    if comm.rank == 0:
        change(optimizer)
    error = same_error(lambda: update(optimizer))
    assert type(error) is chainermn.CollectiveMismatchError
    assert 'options of the multi-node optimizer differ between ranks (no data' in str(error)
    assert f'\n  {text}' in str(error) and 'compare_settings=False' in str(error)
    if comm.rank != 0 or change is load:  # training continues after the same change on all ranks
        change(optimizer)
    update(optimizer, 2)
    comm.check_replicas(optimizer.target)


@pytest.mark.mpi(min_size=2)
@each_case('add, name', [
    (lambda o: o.add_hook(hook), 'hooks: hook'),
    (lambda o: o.add_hook(hook, timing='post'), 'hooks after updates: hook'),
    (lambda o: o.target[0].W.update_rule.add_hook(lambda rule, param: None, 'mask'),
     'hooks of /0/W: mask')])
def test_a_hook_of_the_program_on_one_rank(comm, add, name):
    """The hook may only read values, so rank 0 warns once instead of raising an error."""
    optimizer = prepared(comm, overlap='always' if 'W' in name else False)
    update(optimizer, 2)
    if comm.rank == 0:
        add(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        update(optimizer, 3)
    texts = [str(each.message) for each in caught]
    assert len(texts) == (comm.rank == 0)
    if texts:
        assert texts[0].startswith('hooks of the multi-node optimizer differ between ranks\n')
        assert f'\n  {name} on rank 0; none on rank' in texts[0]
    comm.check_replicas(optimizer.target)


@pytest.mark.mpi(min_size=2)
def test_an_argument_of_a_hook_that_changes(comm, same_error):
    for of_rule in False, True:
        optimizer = prepared(comm)
        added = optimizer_hooks.WeightDecay(0.1)
        (optimizer.target[1].b.update_rule if of_rule else optimizer).add_hook(added)
        update(optimizer, 2)
        added.rate = 0.2 if comm.rank == 0 else 0.1
        assert 'WeightDecay(rate=0.2) on rank 0' in str(same_error(update, optimizer))
        added.rate = 0.2
        update(optimizer)
        comm.check_replicas(optimizer.target)


@pytest.mark.mpi(min_size=2)
@each_case('create, text', [
    (lambda o: vars(o.hyperparam).setdefault('x', np.array(.1)), 'x: 0.5 on rank 0; 0.1 on rank'),
    (lambda o: setattr(o, 'lr', np.array([.1])) or o.lr, 'lr: [0.5] on rank 0; [0.1] on rank'),
    (lambda o: vars(o.hyperparam).setdefault('betas', [.1, .2]), 'betas: [0.5, 0.2] on rank 0;'),
    (lambda o: vars(o.target[1].b.update_rule.hyperparam).setdefault('lr', np.array([.1])),
     'update of /1/b: enabled, lr [0.5] on rank 0; enabled, lr [0.1] on rank')])
def test_a_change_in_place(comm, same_error, create, text):
    optimizer = prepared(comm)
    update(optimizer, 2)
    value = create(optimizer)
    update(optimizer, 2)
    place = slice(0, 1) if np.ndim(value) else ()
    value[place] = [.3] if place else .3  # on all ranks
    update(optimizer, 2)
    value[place] = [.5 if comm.rank == 0 else .1] if place else .5 if comm.rank == 0 else .1
    assert text in str(same_error(update, optimizer))


@pytest.mark.mpi(min_size=2)
def test_noise(comm, same_error):
    """Replicas stay equal only if all ranks draw the same noise."""
    optimizer = prepared(comm)
    optimizer.add_hook(optimizer_hooks.GradientNoise(0.01))
    np.random.seed(comm.rank)
    assert 'state of numpy.random (GradientNoise needs the same seed on all ranks): ' in str(
        same_error(lambda: update(optimizer)))
    np.random.seed(0)
    update(optimizer, 3)
    comm.check_replicas(optimizer.target)
    optimizer = prepared(comm)
    optimizer.target[0].W.update_rule.add_hook(optimizer_hooks.GradientNoise(0.01))
    np.random.seed(comm.rank)
    assert 'GradientNoise needs the same seed' in str(same_error(lambda: update(optimizer)))


def test_noise_that_one_rank_draws(comm):
    """With sharded states, only one rank calls the hooks of an update rule."""
    optimizer = prepared(comm, shard_states=True)
    optimizer.target[0].W.update_rule.add_hook(optimizer_hooks.GradientNoise(0.01))
    np.random.seed(comm.rank)
    update(optimizer, 2)
    optimizer.lr = 0.2
    update(optimizer, 2)
    comm.check_replicas(optimizer.target)


class OnDevice:
    """A parameter on a device whose arrays belong to a module."""

    def __init__(self, param, xp):
        self.update_rule, self.device = param.update_rule, types.SimpleNamespace(xp=xp)


def test_noise_on_a_gpu_does_not_depend_on_numpy():
    optimizer = optimizers.SGD().setup(L.Linear(1, 1))
    optimizer.add_hook(optimizer_hooks.GradientNoise(0.01))
    for xp in np, types:
        settings = OptimizerSettings(optimizer, 'optimizer', 'create')
        digests = set()
        for seed in range(2):
            np.random.seed(seed)
            settings.compare([(path, OnDevice(param, xp))
                              for path, param in sorted(optimizer.target.namedparams())])
            digests.add(settings.caller.digest)
        assert len(digests) == (2 if xp is np else 1)
        assert any('numpy.random' in name for name in settings.caller.options) == (xp is np)


def test_differences_on_purpose(comm):
    optimizer = prepared(comm, optimizers.SGD(1. + comm.rank), compare_settings=False)
    optimizer.target[0].W.array[...] = 1
    update(optimizer)
    optimizer.target.cleargrads()
    optimizer.target[0].W.grad = np.ones((2, 2), 'f')
    before = optimizer.target[0].W.array.copy()
    optimizer.update()
    np.testing.assert_array_equal(optimizer.target[0].W.array, before - 1 - comm.rank)


class Schedule:
    """An object that cannot be compared."""

    def __eq__(self, other):
        raise TypeError

    __hash__ = None


class OwnUpdate(chainer.Optimizer):
    """An optimizer without update rules."""

    def __init__(self, kind):
        super().__init__()
        self.hyperparam = chainer.optimizer.Hyperparameter() if kind else {'lr': 0.1}

    def update(self, lossfun=None, *args, **kwds):
        self.t += 1
        for param in self.target.params():
            param.array -= 0.1 * param.grad


def test_optimizers_and_hyperparameters_of_any_kind(comm):
    for kind in range(2):
        optimizer = prepared(comm, OwnUpdate(kind))
        update(optimizer, 3)
        comm.check_replicas(optimizer.target)
    optimizer = prepared(comm)
    for value in Schedule(), Schedule(), np.arange(comm.rank + 2000), np.arange(3), None:
        optimizer.hyperparam.other = value
        update(optimizer)
    comm.check_replicas(optimizer.target)


class Loud(optimizers.MomentumSGD):
    """A subclass that one rank uses to print something."""


def test_correct_programs_stay_silent(comm):
    """Settings that change in the same way, or that do not matter."""
    optimizer = prepared(comm, Loud(0.1) if comm.rank == 0 else None)
    optimizer.log = ['only on this rank'] * comm.rank
    for schedule in range(4):
        update(optimizer, 2)
        optimizer.lr = np.float64(0.1) / (1 + schedule) if comm.rank else 0.1 / (1 + schedule)
        optimizer.target[schedule % 2].disable_update()
    optimizer.lr = 1 if comm.rank else 1.
    update(optimizer)
    sign = 1 if comm.rank else -1
    for value in 0., np.nan, np.zeros(2), np.array([np.nan]), (0., np.float32(np.nan)):
        optimizer.hyperparam.other = (*(sign * x for x in value),) if isinstance(
            value, tuple) else sign * value
        update(optimizer)
    optimizer.add_hook(optimizer_hooks.WeightDecay(0.1))
    update(optimizer)
    optimizer.remove_hook('WeightDecay')
    optimizer.add_hook(Counter(comm.rank), 'counter')  # a hook may have any state
    update(optimizer)
    if comm.rank == 0:  # evaluation changes nothing of it
        optimizer.epoch += 1
    update(optimizer)
    optimizer.actual_optimizer.t += 5  # on all ranks
    update(optimizer)
    load(optimizer)
    update(optimizer, 2)
    optimizer.setup(optimizer.target)
    update(optimizer, 2)
    comm.check_replicas(optimizer.target)


class Counter:
    def __init__(self, rank):
        self.count = rank

    def __call__(self, optimizer):
        self.count += 1


@pytest.mark.mpi(min_size=2)
def test_join_compares_at_its_beginning(comm, same_error):
    optimizer = prepared(comm)
    with chainermn.join(optimizer):
        update(optimizer, 2)
    if comm.rank == 0:
        optimizer.lr = 0.05

    def enter():
        with chainermn.join(optimizer):
            pass

    assert '\n  lr: 0.05 on rank 0; 0.1 on rank' in str(same_error(enter))
    optimizer.lr = 0.05
    optimizer.add_hook(hook, f'hook of rank {comm.rank}')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        with chainermn.join(optimizer):
            update(optimizer, 2)
    assert len(caught) == (comm.rank == 0)
    comm.check_replicas(optimizer.target)
