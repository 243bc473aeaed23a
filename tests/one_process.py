"""Random trainings, and what one process computes from the definition of a multi-node optimizer.

The reference uses Chainer's optimizer on a single model.  It computes the gradients of all ranks
one after the other, and their mean with NumPy in float64.
"""

import copy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import optimizer_hooks as hooks
from chainer import optimizers
from chainer.optimizers.adam import AdamRule

import chainermn

N_IN, N_OUT, BATCH, STEPS = 5, 6, 3, 7


class LambRule(AdamRule):
    """A rule that is not elementwise, although its base class is."""

    def update_core_cpu(self, param):
        old = param.array.copy()
        super().update_core_cpu(param)
        step = param.array - old
        before, after = np.linalg.norm(old), np.linalg.norm(step)
        if before > 0 and after > 0:
            param.array[...] = old + (step * (.1 * before / after)).astype(param.dtype)


class Lamb(optimizers.Adam):
    def create_update_rule(self):
        return LambRule(self.hyperparam)


OPTIMIZERS = [
    *(getattr(optimizers, name) for name in (
        'AdaDelta', 'AdaGrad', 'Adam', 'CorrectedMomentumSGD', 'MomentumSGD', 'MSVAG',
        'NesterovAG', 'RMSprop', 'RMSpropGraves', 'SGD', 'SMORMS3')),
    lambda: optimizers.Adam(amsgrad=True), lambda: optimizers.Adam(adabound=True),
    lambda: optimizers.Adam(weight_decay_rate=.1), Lamb]
HOOKS = [
    lambda: hooks.GradientClipping(.1), lambda: hooks.GradientHardClipping(-.01, .01),
    hooks.GradientLARS, lambda: hooks.Lasso(.01), lambda: hooks.WeightDecay(.01)]
COMPRESSIONS = [None, None, 'fp16', 'bf16', {'type': '2bit', 'threshold': .02},
                {'type': 'powersgd', 'rank': 1}]
CHANGES = ['nothing', 'enable', 'rule hook', 'hook', 'hyperparameter', 'resume']
#: Relative to the largest parameter: float16, float32, float64.
TOLERANCES = {'e': 3e-2, 'f': 2e-4, 'd': 1e-8}
#: Of gradients, by their rounding.
ROUNDING = {'fp16': 2e-2, 'bf16': .1}


class Init(chainer.initializer.Initializer):
    """Random values that depend on the shape and the rank."""

    def __init__(self, *seed, dtype='f'):
        super().__init__(dtype)
        self.seed = seed

    def __call__(self, array):
        random = np.random.RandomState([*self.seed, *array.shape])
        array[...] = random.standard_normal(array.shape) / np.sqrt(max(1, *array.shape[-1:], 1))


class Net(chainer.Chain):
    """A model with all kinds of parameters.

    Args:
        case: The random case.
        rank: Its initial values.
    """

    def __init__(self, case, rank):
        super().__init__()
        dtype, width = case.dtype, case.width
        self.case = case

        def init(n):
            return Init(case.seed, rank, n, dtype=dtype)

        def array(n, *shape):
            values = np.zeros(shape, dtype)
            init(n)(values)
            return values

        with self.init_scope():
            self.first = L.Linear(N_IN, width, initialW=init(0), initial_bias=init(1))
            self.hidden = L.Linear(None if case.is_late else width, width, initialW=init(2),
                                   initial_bias=init(12))
            self.tied = chainer.Parameter(array(3, width, width))
            self.last = L.Linear(width, N_OUT, initialW=init(4), initial_bias=init(13))
            self.frozen = chainer.Parameter(array(5, N_OUT))
            self.unused = chainer.Parameter(array(6, 3, 70))
            self.scalar = chainer.Parameter(array(7))
            self.one = chainer.Parameter(array(8, N_OUT))
            self.two = chainer.Parameter(array(9, N_OUT))
            self.empty = chainer.Parameter(array(10, 0, 2))
        if case.tie == 'parameter':
            self.last.b = self.one
        elif case.tie == 'view':
            self.tied.array = self.first.W.array[:, :1].T + self.tied.array
            self.unused.array = self.tied.array[:2].T
        elif case.tie == 'same':
            self.two.array = self.one.array
        elif case.tie == 'overlapping':
            whole = array(11, 2 * N_OUT)
            self.one.array, self.two.array = whole[:N_OUT], whole[2:N_OUT + 2]
        if case.is_strided:
            self.last.W.array = np.asfortranarray(self.last.W.array)
            self.frozen.array = np.repeat(self.frozen.array, 2)[::2]
            self.one.array = self.one.array if case.tie else np.repeat(self.one.array, 3)[::3]

    def forward(self, x, t, uses):
        h = F.tanh(self.hidden(F.tanh(self.first(x))))
        if uses['tied']:
            h = F.tanh(F.matmul(h, self.tied)) + h
        y = self.last(h)
        y += F.broadcast_to((self.one + self.two) * self.frozen, y.shape)  # gradients of one array
        if uses['scalar']:
            y *= F.broadcast_to(self.scalar, y.shape)
        if uses['unused']:
            y += F.broadcast_to(F.sum(self.unused), y.shape) / 100
        return F.sum((y - t) ** 2) / (BATCH * N_OUT)


class Case:
    """A random case; the same on all ranks.

    Args:
        seed: Draws everything.
        size: The number of ranks.
    """

    def __init__(self, seed, size):
        draw = np.random.RandomState(seed)

        def choose(options):
            return options[draw.randint(len(options))]

        self.seed, self.size = seed, size
        self.create = OPTIMIZERS[seed % len(OPTIMIZERS)]
        self.dtype = choose('dddffe')
        self.width = choose([1, 7, 20])
        self.is_late, self.is_strided = draw.rand(2) < .3
        self.tie = choose(['', '', 'parameter', 'view', 'same', 'overlapping'])
        self.zero_fill = draw.rand() < .7
        self.compression = choose(COMPRESSIONS)
        self.shard = draw.rand() < .6
        self.mode = choose(['plain', 'plain', 'overlap', 'double buffering'])
        self.n_accumulations = 1 if self.mode == 'double buffering' else choose([1, 1, 2, 3])
        if self.mode == 'double buffering' and self.kind == 'powersgd':
            self.compression = None
        self.scale = choose([None, None, 4., 'dynamic'])
        self.is_fp32 = self.dtype == 'e' and draw.rand() < .5
        self.hooks = [choose(HOOKS) for _ in range(draw.randint(3))]
        self.batches = draw.choice([0, 1, BATCH], (100, size))
        #: A parameter that a rank does not use; without zero_fill on all ranks.
        self.used = draw.rand(100, size, 3) < .7
        if not self.zero_fill or (self.kind == '2bit' and self.mode == 'overlap'):
            self.used[:] = self.used[:1, :1]  # with overlap, residuals belong to buckets
        if self.kind == 'powersgd':  # zeros would make a singular vector of rounding errors
            self.used[:], self.batches[:] = True, BATCH
        changes = CHANGES
        if self.is_fp32 and self.tie != 'parameter':  # the first step of Chainer unties arrays
            changes = changes[:-1]
        self.changes = [choose(changes) for _ in range(STEPS)]
        self.numbers = draw.randint(1000, size=STEPS).tolist()

    @property
    def kind(self):
        return self.compression['type'] if isinstance(self.compression, dict) else self.compression

    @property
    def tolerance(self):
        return max(TOLERANCES[self.dtype], ROUNDING.get(self.kind, 0))

    def __str__(self):
        return ', '.join(f'{name}={value}' for name, value in {
            **vars(self), 'changes': self.changes, 'batches': '', 'used': ''}.items())

    def batch(self, number, rank):
        """Return the arguments of the loss in an update of a rank."""
        random = np.random.RandomState([self.seed, number, rank])
        n = self.batches[number, rank]
        x, t = random.randn(n, N_IN).astype(self.dtype), random.randn(n, N_OUT).astype(self.dtype)
        return x, t, dict(zip(('tied', 'scalar', 'unused'), self.used[number, rank], strict=True))

    def configure(self, optimizer):
        """Set up everything but the model."""
        if self.is_fp32:
            optimizer.use_fp32_update()
        if self.dtype == 'e' and 'eps' in optimizer.hyperparam.get_dict():
            optimizer.hyperparam.eps = 1e-3  # others are zero in float16
        if self.scale:
            optimizer.loss_scaling(2, None if self.scale == 'dynamic' else self.scale)
        for n, create in enumerate(self.hooks):
            optimizer.add_hook(create(), f'hook {n}')
        optimizer.target.frozen.update_rule.enabled = False

    def change(self, optimizer, step):
        """Change an optimizer, multi-node or not."""
        change, number = self.changes[step], self.numbers[step]
        params = [param for _, param in sorted(optimizer.target.namedparams())]
        rule = params[number % len(params)].update_rule
        if change == 'enable':
            rule.enabled = not rule.enabled
        elif change == 'rule hook':
            rule.add_hook(hooks.WeightDecay(.01), f'hook {step}')
        elif change == 'hook':
            optimizer.add_hook(HOOKS[number % len(HOOKS)](), f'later hook {step}')
        elif change == 'hyperparameter':
            for name in sorted({'lr', 'alpha', 'beta'} & {*optimizer.hyperparam.get_dict()}):
                setattr(optimizer, name, getattr(optimizer, name) * .9)


def arrays(model):
    return {path: param.array.copy() for path, param in sorted(model.namedparams())}


class Reference:
    """One process that computes what all ranks do together."""

    def __init__(self, case):
        self.case = case
        self.model = Net(case, 0)
        self.optimizer = case.create().setup(self.model)
        case.configure(self.optimizer)
        self.compressor = {'fp16': Rounding(to_float16), 'bf16': Rounding(to_bfloat16),
                           '2bit': TwoBit(case), 'powersgd': PowerSGD(case)}.get(case.kind)
        self.is_fresh = True  # the next update broadcasts
        self.sums = []  # the gradients of the updates of an accumulation, by rank
        self.sent = None  # double buffering

    def update(self, number):
        case = self.case
        gradients = [self.gradients(number, rank) for rank in range(case.size)]
        if self.is_fresh:
            self.is_fresh, self.sums, self.sent = False, [], None
            return
        self.sums.append(gradients)
        if len(self.sums) < case.n_accumulations:
            return
        own = [{path: np.mean([each[rank][path] for each in self.sums], 0)
                .astype(gradients[0][path].dtype) for path in gradients[0]}
               for rank in range(case.size)]
        self.sums = []
        before = copy.deepcopy(self.compressor)
        means = self.mean(own)
        scale = self.optimizer._loss_scale
        if case.mode == 'double buffering':
            self.sent, (means, scale) = (means, scale), self.sent or (None, None)
        if means is not None:
            self.step(means, scale)
            if self.optimizer._loss_scaling_isnan and case.mode != 'double buffering':
                self.compressor = before  # nothing was sent

    def gradients(self, number, rank):
        self.model.cleargrads()
        loss = self.model(*self.case.batch(number, rank))
        loss.backward(loss_scale=self.optimizer._loss_scale)
        return {path: np.zeros_like(param.array) if param.grad is None else np.array(param.grad)
                for path, param in sorted(self.model.namedparams())}

    def mean(self, own):
        if self.compressor is not None:
            # What is kept for later steps has no loss scale.
            scale = isinstance(self.compressor, Rounding) or self.optimizer._loss_scale or 1
            return {path: (scale * self.compressor.mean(path, [
                x.astype(np.promote_types(x.dtype, 'f')) / np.float32(scale)
                for x in (each[path] for each in own)])).astype(own[0][path].dtype)
                for path in own[0]}
        return {path: np.mean([each[path].astype('d') for each in own], 0)
                .astype(own[0][path].dtype) for path in own[0]}

    def step(self, means, scale):
        for path, param in self.model.namedparams():
            param.grad = np.array(means[path])
            if scale is not None:
                param._loss_scale = scale
        self.optimizer.update()


class Rounding:
    def __init__(self, rounded):
        self.rounded = rounded

    def mean(self, path, own):
        return self.rounded(np.mean([self.rounded(x).astype('d') for x in own], 0))


def to_float16(x):
    with np.errstate(over='ignore'):
        return x.astype('e')


def to_bfloat16(x):
    scale = 2. ** (np.frexp(x.astype('d'))[1] - 8)  # 8 significant bits
    return np.round(x / scale) * scale


class TwoBit:
    """As the docstring of the compressor says."""

    def __init__(self, case):
        self.threshold = case.compression['threshold'] if case.kind == '2bit' else None
        self.residuals = {}

    def mean(self, path, own):
        sent = []
        for rank, x in enumerate(own):
            value = x.astype(np.promote_types(x.dtype, 'f')) + self.residuals.get((path, rank), 0)
            sent.append(self.threshold * ((value >= self.threshold) * 1.
                                          - (value <= -self.threshold)))
            self.residuals[path, rank] = (value - sent[-1]).astype(value.dtype)
        return np.mean(sent, 0)


class PowerSGD:
    """As the docstring of the compressor says."""

    def __init__(self, case):
        self.rank = case.compression['rank'] if case.kind == 'powersgd' else None
        self.errors, self.q = {}, {}

    def mean(self, path, own):
        n = len(own[0]) if own[0].ndim > 1 else 0
        if not n or own[0].size < 2 * self.rank * (n + own[0].size // n):
            return np.mean([x.astype('d') for x in own], 0)
        matrices = [x.reshape(n, -1) + self.errors.get((path, rank), 0)
                    for rank, x in enumerate(own)]
        q = self.q.get(path)
        if q is None:
            q = np.random.RandomState(n * 65537 % 2**32).standard_normal(
                (matrices[0].shape[1], self.rank))
        p, _ = np.linalg.qr(np.mean([m @ q for m in matrices], 0).astype('d'))
        self.q[path] = q = np.mean([m.T @ p for m in matrices], 0)
        for rank, m in enumerate(matrices):
            self.errors[path, rank] = m - p @ q.T
        return (p @ q.T).reshape(own[0].shape)


class MultiNode:
    """The same training with the optimizer of all ranks."""

    def __init__(self, case, comm):
        self.case, self.comm = case, comm
        self.optimizer = self.start()

    def start(self):
        case = self.case
        optimizer = chainermn.create_multi_node_optimizer(
            case.create(), self.comm, case.mode == 'double buffering', case.zero_fill,
            n_accumulations=case.n_accumulations, compression=case.compression,
            overlap='always' if case.mode == 'overlap' else False, bucket_mb=1e-4,
            shard_states=bool(case.shard)).setup(Net(case, self.comm.rank))
        case.configure(optimizer)
        return optimizer

    def update(self, number):
        self.optimizer.update(self.optimizer.target, *self.case.batch(number, self.comm.rank))

    def resume(self):
        """Save and load on each rank, into a new optimizer."""
        old, new = self.optimizer, self.start()
        if hasattr(old, 'wait'):
            old.wait()
        for hook in ('_pre_update_hooks', '_post_update_hooks'):
            getattr(new._hookable, hook).update(getattr(old._hookable, hook))
        for (_, before), (_, after) in zip(sorted(old.target.namedparams()),
                                           sorted(new.target.namedparams()), strict=True):
            after.update_rule._hookable = before.update_rule._hookable
            after.update_rule.enabled = before.update_rule.enabled
        for name, value in old.hyperparam.get_dict().items():
            setattr(new.hyperparam, name, value)
        for before, after in ((old.target, new.target), (old, new)):
            serializer = chainer.serializers.DictionarySerializer()
            serializer.save(before)
            chainer.serializers.NpzDeserializer(
                {key: np.array(value) for key, value in serializer.target.items()},
                strict=after is new.target).load(after)
        self.optimizer = new


def check(seed, comm):
    """Train both ways; raise AssertionError on all ranks if the parameters differ.

    Rank 0 has the reference.
    """
    case = Case(seed, comm.size)
    found = MultiNode(case, comm)
    references = [Reference(case)] if comm.rank == 0 else []
    number, is_fresh = 0, True
    for step in range(STEPS):
        if step > 1:
            if case.changes[step] == 'resume':
                found.resume()
                is_fresh = True
                for each in references:
                    each.is_fresh = True
            for each in *references, found:
                case.change(each.optimizer, step)
        for _ in range(1 if is_fresh else case.n_accumulations):
            for each in *references, found:
                each.update(number)
            number += 1
        is_fresh = False
        expected, t = comm.mpi_comm.bcast(next(
            ((arrays(each.model), each.optimizer.t) for each in references), None))
        if not all(np.isfinite(array).all() for array in expected.values()):
            break  # float16 may overflow, and 1 ulp changes everything from there
        compare(case, comm, step, found, expected, t)
    if hasattr(found.optimizer, 'wait'):
        found.optimizer.wait()


def compare(case, comm, step, found, expected, t):
    ours, differing = arrays(found.optimizer.target), {}
    for path, array in expected.items():
        scale = max(1., np.abs(array).max(initial=0))
        error = float(np.abs(ours[path].astype('d') - array).max(initial=0)) / scale
        if not error <= case.tolerance:
            differing[path] = error
    if found.optimizer.t != t:
        differing['t'] = f'{found.optimizer.t}, not {t}'
    everywhere = comm.allgather_obj(differing)
    assert not any(everywhere), f'step {step}: {everywhere} in {case}'
