"""create_kvstore_optimizer on random models, compared with Chainer's optimizer in one process.

The reference steps with mean gradients that are computed from their definition in float64.
"""

import copy

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import optimizer_hooks as hooks
from chainer import optimizers
from each_case import each_case
from laws.programs import Lamb
from mpi4py import MPI

from chainermn.kvstore import create_kvstore_optimizer

OPTIMIZERS = {
    'SGD': lambda: optimizers.SGD(.1),
    'MomentumSGD': lambda: optimizers.MomentumSGD(.1),
    'CorrectedMomentumSGD': lambda: optimizers.CorrectedMomentumSGD(.1),
    'NesterovAG': lambda: optimizers.NesterovAG(.1),
    'AdaGrad': lambda: optimizers.AdaGrad(.1),
    'AdaDelta': lambda: optimizers.AdaDelta(),
    'Adam': lambda: optimizers.Adam(.1, eps=1e-3),
    'AMSGrad': lambda: optimizers.Adam(.1, eps=1e-3, amsgrad=True),
    'AdaBound': lambda: optimizers.AdaBound(.1, eps=1e-3),
    'AdamW': lambda: optimizers.Adam(.1, eps=1e-3, weight_decay_rate=.01),
    'RMSprop': lambda: optimizers.RMSprop(.1, eps=1e-3),
    'RMSpropGraves': lambda: optimizers.RMSpropGraves(.1),
    'SMORMS3': lambda: optimizers.SMORMS3(.1),
    'MSVAG': lambda: optimizers.MSVAG(.1),
    'Lamb': lambda: Lamb(.1, eps=1e-3),
}
IN_FLOAT16 = ['SGD', 'MomentumSGD', 'CorrectedMomentumSGD', 'NesterovAG']
LENGTH = 7
THRESHOLD = .5


class MaxNorm:
    """A hook that needs all elements of a parameter, after the update."""

    name = 'MaxNorm'
    call_for_each_param = True
    timing = 'post'

    def __call__(self, rule, param):
        if param.array is not None:
            norm = np.linalg.norm(param.array.astype(np.float64))
            param.array *= param.dtype.type(2 / max(2, norm))


def noise(xp, shape, dtype, hook, rule):
    return np.full(shape, .1 / rule.t if rule.t else .2, dtype)


HOOKS = {
    'decay': lambda: hooks.WeightDecay(.1), 'lasso': lambda: hooks.Lasso(.01),
    'hard': lambda: hooks.GradientHardClipping(-1.1, 1.1), 'noise': lambda: hooks.GradientNoise(
        .1, noise), 'lars': hooks.GradientLARS, 'norm': MaxNorm,
    'clip': lambda: hooks.GradientClipping(2.),
}
OF_ALL_PARAMETERS = ['clip']


class Parameter:
    """What a random parameter is, on all ranks and in the reference."""

    def __init__(self, random, n):
        shapes = [(3,), (2, 3), (), (4, 2, 2), (40,), (1,)]
        self.shape = shapes[random.randint(len(shapes))]
        self.dtype = random.choice(['float16', 'float32', 'float32', 'float64'])
        self.n_paths = random.choice([1, 1, 1, 2, 3])
        self.layout = random.choice(['C', 'F', 'strided', 'reversed'])
        self.first_use = random.choice([0, 0, 0, 0, 3, LENGTH])  # uninitialized before
        self.is_lazy = random.rand() < .3
        self.is_frozen = random.rand() < .15
        self.start = grid(random, self.shape)
        self.name = f'p{n}'

    def make(self, rank=0):
        if self.is_lazy:
            parameter = chainer.Parameter(chainer.initializers.Zero(self.dtype))
        else:
            parameter = chainer.Parameter(self.array(rank))
        return parameter

    def array(self, rank):
        """Return the initial values, which the other ranks get from rank 0."""
        x = (self.start + rank).astype(self.dtype) if self.shape else np.array(
            self.start + rank, self.dtype)
        if self.layout == 'F' and self.shape:
            return np.asfortranarray(x)
        if self.layout == 'strided' and self.shape:
            return np.repeat(x, 2, axis=-1)[..., ::2]
        if self.layout == 'reversed' and self.shape:
            return np.ascontiguousarray(x[::-1])[::-1]
        return x


def grid(random, shape):
    """Return random multiples of 1/32, so that sums are exact in each dtype."""
    return np.asarray(random.randint(-40, 41, shape) / 32)


class Model(chainer.Chain):
    """Each parameter in as many links as it has paths."""

    def __init__(self, parameters, rank):
        super().__init__()
        self.made = [parameter.make(rank) for parameter in parameters]
        with self.init_scope():
            for parameter, made in zip(parameters, self.made, strict=True):
                for n in range(parameter.n_paths):
                    link = chainer.Chain()
                    with link.init_scope():
                        link.w = made
                    setattr(self, f'{parameter.name}_{n}', link)


class Case:
    def __init__(self, seed, config_type):
        random = self.random = np.random.RandomState(seed)
        self.type = config_type
        self.parameters = [Parameter(random, n) for n in range(1 + random.randint(4))]
        self.optimizer = random.choice(sorted(OPTIMIZERS))
        self.on_store = bool(random.randint(2))
        self.bound = random.choice([5, 1_000_000])
        self.has_copies = bool(random.randint(2))
        self.scale = random.choice([None, None, 8., 1024.])
        self.hooks = [name for name in HOOKS if random.rand() < .12]
        self.is_compressed = random.rand() < .25
        self.reload_at = random.choice([None, 4])
        self.uses_sum = random.rand() < .3  # its gradient is a read-only view of one number
        for parameter in self.parameters:
            if parameter.dtype == 'float16' and (
                    not (self.has_copies or self.optimizer in IN_FLOAT16)
                    or 'lasso' in self.hooks  # signs of rounding errors
                    or ('norm' in self.hooks and self.has_copies)):  # Chainer's copy ignores it
                parameter.dtype = 'float32'
            if 'lars' in self.hooks and not parameter.shape:
                parameter.shape, parameter.start = (2,), np.ones(2)
            if parameter.is_lazy and (self.reload_at or self.has_copies):
                parameter.first_use = 0  # Chainer cannot load or copy uninitialized parameters
        if 'lars' in self.hooks and self.scale:
            self.scale = 8.  # the norm overflows in float16
        if self.needs_gradients:
            self.is_compressed = False
            for parameter in self.parameters:
                parameter.first_use = 0

    def __repr__(self):
        parameters = [vars(parameter) for parameter in self.parameters]
        return f'{({**vars(self), "parameters": parameters})}'

    def make_optimizer(self, model):
        optimizer = OPTIMIZERS[self.optimizer]()
        if self.has_copies:
            optimizer.use_fp32_update()
        optimizer.setup(model)
        if self.scale:
            optimizer.set_loss_scale(self.scale)
        for name in self.hooks:
            optimizer.add_hook(HOOKS[name]())
        for parameter, made in zip(self.parameters, model.made, strict=True):
            if parameter.is_frozen:
                made.update_rule.enabled = False
        return optimizer

    def gradients(self, n_workers):
        """Return for each worker and parameter a float64 gradient, or None if it is unused."""
        return [[grid(self.random, parameter.shape)
                 if self.random.rand() < .8 or self.needs_gradients else None
                 for parameter in self.parameters] for _ in range(n_workers)]

    @property
    def needs_gradients(self):
        """Whether a hook divides by norms, which must not be 0."""
        return 'lars' in self.hooks or 'clip' in self.hooks


def initialize(parameter, made, rank):
    made.initialize(parameter.shape)
    made.array[...] = parameter.array(rank)


def loss_of(case, model, gradients, step):
    """Return a loss with these gradients for each path of each parameter."""
    loss = chainer.Variable(np.zeros((), np.float64))
    for parameter, made, gradient in zip(case.parameters, model.made, gradients, strict=True):
        if step < parameter.first_use:
            continue
        if not made.is_initialized:
            initialize(parameter, made, 0 if case.type == 'local' else MPI.COMM_WORLD.rank)
        if gradient is None:
            continue
        for _ in range(parameter.n_paths):
            wide = F.cast(made, np.float64)
            loss += F.sum(wide * gradient)
            if case.uses_sum:
                loss += F.cast(F.sum(made), np.float64)
    return loss


class Reference:
    """Chainer's optimizer in one process, in float64 where the parameters are not float16."""

    def __init__(self, case, n_workers):
        self.case, self.n = case, n_workers
        self.residuals = {}
        self.wide = [copy.copy(parameter) for parameter in case.parameters]
        for parameter in self.wide:
            parameter.dtype = 'float16' if parameter.dtype == 'float16' else 'float64'
        self.model = Model(self.wide, 0)
        self.optimizer = case.make_optimizer(self.model)

    def initialize(self, step):
        """Initialize parameters as the loss does; return whether there are new ones."""
        new = [made for parameter, made in zip(self.wide, self.model.made, strict=True)
               if not made.is_initialized and step >= parameter.first_use]
        for parameter, made in zip(self.wide, self.model.made, strict=True):
            if any(made is one for one in new):
                initialize(parameter, made, 0)
        return bool(new) or (step == 0 and any(made.is_initialized for made in self.model.made))

    def step(self, gradients, step):
        """Make an update with the gradients of all workers."""
        self.model.cleargrads()
        for n, (parameter, made) in enumerate(zip(self.wide, self.model.made, strict=True)):
            if not made.is_initialized:
                continue
            total = np.zeros(parameter.shape)
            for worker in range(self.n):
                total += self._sent(worker, n, parameter, gradients[worker][n], step)
            made.grad = np.asarray(total / self.n).astype(parameter.dtype)
            made._loss_scale = self.case.scale
        self.optimizer.update()

    def _sent(self, worker, n, parameter, gradient, step):
        local = np.zeros(parameter.shape)
        if gradient is not None and step >= parameter.first_use:
            local = (gradient + self.case.uses_sum) * parameter.n_paths
        scale = self.case.scale or 1
        if not self.case.is_compressed or self.case.type == 'local':
            return local * scale
        value = local + self.residuals.get((worker, n), 0)
        sent = THRESHOLD * ((value >= THRESHOLD).astype(float) - (value <= -THRESHOLD))
        self.residuals[worker, n] = value - sent  # without the loss scale
        return sent * scale


def play(case, comm, create, path):
    n, me = (1, 0) if case.type == 'local' else (comm.size, comm.rank)

    def start():
        model = Model(case.parameters, me)
        kv = create(case.type, bigarray_bound=case.bound)
        if case.is_compressed:
            kv.set_gradient_compression({'type': '2bit', 'threshold': THRESHOLD})
        return model, kv, create_kvstore_optimizer(
            case.make_optimizer(model), kv, update_on_kvstore=case.on_store)

    if case.on_store and set(case.hooks) & set(OF_ALL_PARAMETERS):
        with pytest.raises(ValueError, match='needs all parameters at once'):
            start()
        return
    reference = Reference(case, n)
    model, kv, optimizer = start()
    differences = []
    for step in range(LENGTH):
        if step == case.reload_at:
            chainer.serializers.save_npz(f'{path}model{comm.rank}', model)
            chainer.serializers.save_npz(f'{path}optimizer{comm.rank}', optimizer)
            if case.on_store:
                kv.save_optimizer_states(f'{path}states{comm.rank if n == 1 else ""}')
            model, kv, optimizer = start()
            chainer.serializers.load_npz(f'{path}model{comm.rank}', model)
            chainer.serializers.load_npz(f'{path}optimizer{comm.rank}', optimizer)
            if case.on_store:
                kv.load_optimizer_states(f'{path}states{comm.rank if n == 1 else ""}')
            reference.residuals.clear()
            optimizer.update()  # initializes the keys
        gradients = case.gradients(n)
        optimizer.update(lambda: loss_of(case, model, gradients[me], step))  # noqa: B023
        if not reference.initialize(step):
            reference.step(gradients, step)
        for parameter, made, expected in zip(
                case.parameters, model.made, reference.model.made, strict=True):
            if made.is_initialized != expected.is_initialized:
                differences.append(f'{step}: {parameter.name} initialized: {made.is_initialized}')
            elif made.is_initialized:
                tolerance = 2e-2 if parameter.dtype == 'float16' else 1e-3
                try:
                    np.testing.assert_allclose(made.array, expected.array, rtol=tolerance,
                                               atol=tolerance, err_msg=f'{step}: {parameter.name}')
                except AssertionError as error:
                    differences.append(str(error))
    assert not differences, '\n'.join([repr(case), *differences[:2]])


@pytest.mark.limit(600)
@each_case('seed', lambda config: range(500 if config.getoption('full') else 20))
def test_random_models(create, comm, path, seed):
    play(Case(seed, ['local', 'dist_sync', 'dist_sync', 'dist_device_sync'][seed % 4]), comm,
         create, path)
    comm.barrier()
