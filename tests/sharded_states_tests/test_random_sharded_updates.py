"""Random trainings: sharded states give the same bits, whatever changes between the steps."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizer_hooks as hooks
from chainer import optimizers

import chainermn

OPTIMIZERS = [
    *(getattr(optimizers, name) for name in (
        'AdaDelta', 'AdaGrad', 'Adam', 'CorrectedMomentumSGD', 'MomentumSGD', 'MSVAG',
        'NesterovAG', 'RMSprop', 'RMSpropGraves', 'SGD', 'SMORMS3')),
    lambda: optimizers.Adam(amsgrad=True), lambda: optimizers.Adam(adabound=True),
    lambda: optimizers.Adam(weight_decay_rate=.1)]
HOOKS = [
    lambda: hooks.GradientClipping(.1), lambda: hooks.GradientHardClipping(-.01, .01),
    hooks.GradientLARS, lambda: hooks.Lasso(.01), lambda: hooks.WeightDecay(.01)]
CHANGES = ['nothing', 'nothing', 'enable', 'rule hook', 'hook', 'hyperparameter', 'resume']
N_IN, N_OUT, BATCH, STEPS = 5, 3, 4, 7


@pytest.fixture(scope='module')
def comm():
    comm = chainermn.create_communicator('flat')
    yield comm
    comm.finalize()


class Case:
    """A random training.

    Args:
        seed: Draws everything; the same on all ranks.
    """

    def __init__(self, comm, seed):
        self.comm, self.seed = comm, seed
        draw = np.random.RandomState(seed)
        self.create = OPTIMIZERS[seed % len(OPTIMIZERS)]
        self.sizes = draw.choice([1, 7, 40, 90], draw.randint(1, 4)).tolist()
        self.dtype = draw.choice(['e', 'f', 'f', 'f'])
        self.is_scaled = draw.rand() < .5
        self.options = [{}, {}, {'n_accumulations': 2}, {'overlap': 'always'}][draw.randint(4)]
        self.changes = draw.choice(CHANGES, STEPS).tolist()
        self.numbers = draw.randint(1000, size=STEPS).tolist()

    def start(self, shard):
        np.random.seed(self.seed)
        with chainer.using_config('dtype', np.dtype(self.dtype)):
            model = chainer.Sequential(*[layer for size in self.sizes for layer in (
                L.Linear(None, size), F.tanh)], L.Linear(None, N_OUT))
        optimizer = chainermn.create_multi_node_optimizer(
            self.create(), self.comm, shard_states=shard, **self.options).setup(model)
        if self.dtype == 'e':
            optimizer.use_fp32_update()
        if self.is_scaled:
            optimizer.loss_scaling(scale=4.)
        return optimizer

    def run(self, shard):
        """Return the parameters after each step."""
        optimizer = self.start(shard)
        steps = []
        for step in range(STEPS):
            if step > 1:
                optimizer = self.change(optimizer, step, shard)
            for part in range(self.options.get('n_accumulations', 1) if step else 1):
                random = np.random.RandomState([self.seed, step, part, self.comm.rank])
                x = random.randn(BATCH, N_IN).astype(self.dtype)
                t = random.randint(N_OUT, size=BATCH)
                optimizer.update(
                    lambda x, t: F.softmax_cross_entropy(optimizer.target(x), t), x, t)  # noqa: B023
            steps.append({path: param.array.copy()
                          for path, param in sorted(optimizer.target.namedparams())})
        return steps

    def change(self, optimizer, step, shard):
        change, number = self.changes[step], self.numbers[step]
        params = [param for _, param in sorted(optimizer.target.namedparams())]
        rule = params[number % len(params)].update_rule
        if change == 'enable':
            rule.enabled = not rule.enabled
        elif change == 'rule hook':
            rule.add_hook(hooks.WeightDecay(.01), f'hook {step}')
        elif change == 'hook':
            optimizer.add_hook(HOOKS[number % len(HOOKS)](), f'hook {step}')
        elif change == 'hyperparameter':
            for name in sorted({'lr', 'alpha', 'eps', 'beta'} & {*optimizer.hyperparam.get_dict()}):
                setattr(optimizer, name, getattr(optimizer, name) * .9)
        elif change == 'resume' and all(param.update_rule.enabled for param in params):
            return self.resume(optimizer, shard)
        return optimizer

    def resume(self, old, shard):
        """Each rank saves and loads."""
        new = self.start(shard)
        for hook in ('_pre_update_hooks', '_post_update_hooks'):
            getattr(new._hookable, hook).update(getattr(old._hookable, hook))
        for (_, before), (_, after) in zip(sorted(old.target.namedparams()),
                                           sorted(new.target.namedparams()), strict=True):
            with chainer.using_config('dtype', np.dtype(self.dtype)):
                after.initialize(before.shape)
            after.update_rule._hookable = before.update_rule._hookable
        for name, value in old.hyperparam.get_dict().items():
            setattr(new.hyperparam, name, value)
        for before, after in ((old.target, new.target), (old, new)):
            serializer = chainer.serializers.DictionarySerializer()
            serializer.save(before)
            chainer.serializers.NpzDeserializer(
                {key: np.array(value) for key, value in serializer.target.items()}).load(after)
        new.is_changed(new.target)  # the next update is an ordinary one
        return new


@pytest.mark.filterwarnings('ignore:overflow', 'ignore:invalid value', 'ignore:divide by zero')
@pytest.mark.parametrize('seeds', [
    range(14), pytest.param(range(14, 500), marks=[pytest.mark.full, pytest.mark.limit(900)])],
    ids=['14', '486'])
def test_same_bits(comm, seeds):
    for seed in seeds:
        case = Case(comm, seed)
        expected, found = case.run(False), case.run(True)
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for path, array in theirs.items():
                np.testing.assert_array_equal(ours[path], array, f'seed {seed}: {vars(case)}, '
                                              f'{path} in step {step}')
