"""Random programs that train a model: their parts, and a strategy that draws them."""

import dataclasses

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import optimizer_hooks as hooks
from chainer import optimizers
from chainer.optimizers.adam import AdamRule
from hypothesis import strategies as st
from laws.blocks import BLOCKS, BY_ROW, Init

from chainermn.communicators.compression import PowerSGD, TwoBit

N_IN, N_OUT, BATCH, STEPS = 5, 6, 3, 5


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


OPTIMIZERS = {
    **{name: getattr(optimizers, name) for name in (
        'SGD', 'MomentumSGD', 'NesterovAG', 'CorrectedMomentumSGD', 'Adam', 'AdaDelta', 'AdaGrad',
        'MSVAG', 'RMSprop', 'RMSpropGraves', 'SMORMS3')},
    'AMSGrad': lambda: optimizers.Adam(amsgrad=True),
    'AdaBound': lambda: optimizers.Adam(adabound=True),
    'AdamW': lambda: optimizers.Adam(weight_decay_rate=.1),
    'Lamb': Lamb,
}


class Hook:
    """A user-defined hook, called for each parameter."""

    call_for_each_param = True
    timing = 'pre'

    def __init__(self, change, timing='pre'):
        self.name, self.change, self.timing = change.__name__, change, timing

    def __call__(self, rule, param):
        if param.grad is not None:
            self.change(param)


def in_place(param):
    param.grad *= param.dtype.type(.5)
    param.grad += param.array * param.dtype.type(.1)


def replaced(param):
    param.grad = np.asarray(np.clip(param.grad, -.01, .01), param.dtype)


def finite(param):
    param.grad = np.asarray(np.where(np.isfinite(param.grad), param.grad, 0), param.dtype)


def variable_replaced(param):
    param.grad_var.array = np.asarray(np.clip(param.grad, -.01, .01), param.dtype)


def bounded(param):
    np.clip(param.array, -2, 2, out=param.array)


#: Each hook processes elements independently, or all elements of one parameter together.
HOOKS = {
    'WeightDecay': lambda: hooks.WeightDecay(.01),
    'Lasso': lambda: hooks.Lasso(.01),
    'GradientHardClipping': lambda: hooks.GradientHardClipping(-.01, .01),
    'GradientClipping': lambda: hooks.GradientClipping(.1),
    'GradientLARS': lambda: hooks.GradientLARS(.5, weight_decay=.5),
    'in place': lambda: Hook(in_place),
    'replaced': lambda: Hook(replaced),
    'finite': lambda: Hook(finite),
    'variable replaced': lambda: Hook(variable_replaced),
    'bounded': lambda: Hook(bounded, 'post'),
}
#: All optimizers get the same compressors, but each optimizer must have its own residuals.
COMPRESSIONS = {
    '': None, 'fp16': 'fp16', 'bf16': 'bf16', '2bit': TwoBit(.02), 'powersgd': PowerSGD(1)}
#: Events before a step.
EVENTS = (
    '', 'enable', 'rule hook', 'hook', 'hyperparameter', 'scale', 'replace', 'add', 'exception',
    'resume')


@dataclasses.dataclass(frozen=True)
class Program:
    """The options of a training run, the same on all ranks.

    Attributes:
        seed: The seed of random numbers, such as the data.
        dtype: The dtype of parameters and data.
        width: The width of hidden layers.
        blocks: The names of hidden layers.
        tie: Which parameters share memory, and how.
        is_strided: Whether some parameters are not contiguous.
        optimizer: The name of the optimizer.
        hooks: The names of the optimizer's hooks.
        scale: The loss scale: None, a number or 'dynamic'.
        is_fp32: Whether float16 parameters are updated in float32.
        is_manual: Whether the program calls ``backward`` itself, and ``update`` without arguments.
        batches: The batch sizes, which ranks and updates use in turn.
        targets: The factor of the random targets.
        unused: Which of three parameters a rank does not use; ranks and updates use them in turn.
        events: The event before each step.
        infinite: The numbers of updates in which one rank has an infinite gradient.
        zero_fill, compression, shard, mode, n_accumulations: Options of the multi-node optimizer.
        communicator: The name of the communicator.
    """

    seed: int
    dtype: str
    width: int
    blocks: tuple[str, ...]
    tie: str
    is_strided: bool
    optimizer: str
    hooks: tuple[str, ...]
    scale: float | str | None
    is_fp32: bool
    is_manual: bool
    batches: tuple[int, ...]
    targets: float
    unused: tuple[tuple[bool, bool, bool], ...]
    events: tuple[str, ...]
    infinite: tuple[int, ...]
    zero_fill: bool
    compression: str
    shard: bool
    mode: str
    n_accumulations: int
    communicator: str

    def batch(self, number, rank, size):
        """Return the arguments of the loss function for an update of a rank."""
        draw = np.random.RandomState([self.seed, number, rank])
        turn = number * size + rank
        n = self.batches[turn % len(self.batches)]
        x, t = (draw.randn(n, k).astype(self.dtype) for k in (N_IN, N_OUT))
        t *= t.dtype.type(self.targets)
        if number in self.infinite and rank == self.seed % size:
            t[:1] = np.inf
        # Without zero_fill, all ranks must have the same gradients.
        unused = self.unused[(turn if self.zero_fill else 0) % len(self.unused)]
        return x, t, unused

    def create(self):
        """Return the optimizer."""
        return OPTIMIZERS[self.optimizer]()

    def configure(self, optimizer):
        """Configure an optimizer that is set up with a model."""
        if self.is_fp32:
            optimizer.use_fp32_update()
        if self.dtype == 'e' and 'eps' in optimizer.hyperparam.get_dict():
            optimizer.hyperparam.eps = 1e-3  # the default is zero in float16
        if self.scale:
            optimizer.loss_scaling(2, None if self.scale == 'dynamic' else self.scale)
        for n, name in enumerate(self.hooks):
            optimizer.add_hook(HOOKS[name](), f'hook {n}')
        optimizer.target.frozen.update_rule.enabled = False

    def happen(self, optimizer, step):
        """Apply the event of a step to an optimizer, multi-node or not."""
        event, number = self.events[step], self.seed + step
        net = optimizer.target
        params = [param for _, param in sorted(net.namedparams()) if param.array is not None]
        param = params[number % len(params)]
        if event == 'enable':
            param.update_rule.enabled = not param.update_rule.enabled
        elif event == 'rule hook':
            param.update_rule.add_hook(hooks.WeightDecay(.01), f'hook {step}')
        elif event == 'hook':
            names = [*HOOKS]
            optimizer.add_hook(HOOKS[names[number % len(names)]](), f'later hook {step}')
        elif event == 'hyperparameter':
            for name in sorted({'lr', 'alpha', 'beta'} & {*optimizer.hyperparam.get_dict()}):
                setattr(optimizer, name, getattr(optimizer, name) * .9)
        elif event == 'scale' and isinstance(self.scale, float):
            optimizer.loss_scaling(scale=self.scale * 2)
        elif event == 'replace':
            param.array = param.array.copy()
        elif event == 'add' and not hasattr(net, 'added'):
            with net.init_scope():
                net.added = chainer.Parameter(np.ones(N_OUT, self.dtype))
            optimizer.setup(net)


class Net(chainer.Chain):
    """A model with all kinds of parameters.

    Args:
        program: The random program.
        rank: The rank, which determines the initial values.
    """

    def __init__(self, program, rank):
        super().__init__()
        dtype, width, seed = program.dtype, program.width, program.seed

        def init(n):
            return Init(seed, rank, n, dtype=dtype)

        def array(n, *shape):
            values = np.zeros(shape, dtype)
            init(n)(values)
            return values

        with self.init_scope():
            self.first = L.Linear(N_IN, width, initialW=init(0), initial_bias=init(1))
            self.blocks = chainer.ChainList(*(
                BLOCKS[name](width, (seed, rank, 20 + n), dtype)
                for n, name in enumerate(program.blocks)))
            self.tied = chainer.Parameter(array(3, width, width))
            self.last = L.Linear(width, N_OUT, initialW=init(4), initial_bias=init(13))
            self.frozen = chainer.Parameter(array(5, N_OUT))
            self.unused = chainer.Parameter(array(6, 3, 70))
            self.scalar = chainer.Parameter(array(7))
            self.one = chainer.Parameter(array(8, N_OUT))
            self.two = chainer.Parameter(array(9, N_OUT))
            self.empty = chainer.Parameter(array(10, 0, 2))
        if program.tie == 'parameter':
            self.last.b = self.one
        elif program.tie == 'view':
            self.tied.array = self.first.W.array[:, :1].T + self.tied.array
            self.unused.array = self.tied.array[:2].T
        elif program.tie == 'same':
            self.two.array = self.one.array
        elif program.tie == 'overlapping':
            whole = array(11, 2 * N_OUT)
            self.one.array, self.two.array = whole[:N_OUT], whole[2:N_OUT + 2]
        if program.is_strided:
            self.last.W.array = np.asfortranarray(self.last.W.array)
            self.frozen.array = np.repeat(self.frozen.array, 2)[::2]
            self.first.b.array = self.first.b.array[::-1].copy()[::-1]
            self.one.array = self.one.array if program.tie else np.repeat(self.one.array, 3)[::3]

    def forward(self, x, t, unused=(False, False, False)):
        without_tied, without_scalar, without_unused = unused
        h = F.tanh(self.first(x))
        for block in self.blocks:
            h = block(h)
        if not without_tied:
            h = F.tanh(F.matmul(h, self.tied)) + h
        y = self.last(h)
        y += F.broadcast_to((self.one + self.two) * self.frozen, y.shape)  # the same gradient array
        if not without_scalar:
            y *= F.broadcast_to(self.scalar, y.shape)
        if not without_unused:
            y += F.broadcast_to(F.sum(self.unused), y.shape) / 100
        if hasattr(self, 'added'):
            y += F.broadcast_to(self.added, y.shape)
        return F.sum((y - t) ** 2) / (BATCH * N_OUT)


@st.composite
def programs(draw, **fixed):
    """Draw a program.

    Args:
        draw: Hypothesis's function that draws from a strategy.
        fixed: Values of fields, or lists of values from which one is drawn.
    """
    def choose(field, values):
        values = fixed.get(field, values)
        return draw(st.sampled_from(values)) if isinstance(values, list) else values

    def some(field, values, least, most):
        values = fixed.get(field, values)
        if isinstance(values, tuple):
            return values
        return tuple(draw(st.lists(st.sampled_from(values), min_size=least, max_size=most)))

    mode = choose('mode', ['plain', 'overlap', 'double buffering'])
    compression = choose('compression', ['', '', '', *COMPRESSIONS])
    dtype = choose('dtype', ['f', 'd', 'e'])
    tie = choose('tie', ['', '', '', 'parameter', 'view', 'same', 'overlapping'])
    zero_fill = choose('zero_fill', [True, True, False])
    batches = some('batches', [BATCH, 0, 1], 1, 5)
    if not zero_fill:  # an LSTM does not use all of its parameters if there are no examples
        batches = tuple(max(1, n) for n in batches)
    unused = some('unused', [(a, b, c) for a in (False, True) for b in (False, True)
                             for c in (False, True)], 1, 4)
    n_accumulations = choose('n_accumulations', [1, 2, 3])
    is_fp32 = choose('is_fp32', [False, True]) and dtype == 'e'
    events = some('events', [*EVENTS], STEPS, STEPS)
    # A step or an event may untie arrays, but the arrays of a new model are still tied.
    if tie != 'parameter' and (is_fp32 or (tie and 'replace' in events)):
        events = tuple('' if event == 'resume' else event for event in events)
    scale = choose('scale', [None, 4., 'dynamic'])
    hooks = some('hooks', [*HOOKS], 0, 2)
    # After an infinite gradient, results can be compared only if dynamic scaling skips the update
    # or a hook makes the gradients finite.
    infinite = some('infinite', range(1, STEPS + 2), 0, 2) if scale == 'dynamic' or (
        hooks[:1] == ('finite',)) else ()
    if mode == 'double buffering':
        n_accumulations = 1
        if compression == 'powersgd':
            compression = ''
    if compression == '2bit' and mode == 'overlap':
        unused = unused[:1]  # use the same parameters: residuals belong to buckets
    if compression == 'powersgd':  # with zeros, a singular vector would consist of rounding errors
        unused, batches = ((False, False, False),), (BATCH,)
    return Program(
        seed=draw(st.integers(0, 10**6)), dtype=dtype,
        width=choose('width', [7, 1, 20]),
        blocks=some('blocks', [*BY_ROW], 0, 2),
        tie=tie, is_strided=choose('is_strided', [False, True]),
        optimizer=choose('optimizer', [*OPTIMIZERS]),
        hooks=hooks, scale=scale, is_fp32=is_fp32, is_manual=choose('is_manual', [False, True]),
        batches=batches, targets=choose('targets', 1.), unused=unused, events=events,
        infinite=infinite, zero_fill=zero_fill, compression=compression,
        shard=choose('shard', [False, True]), mode=mode,
        n_accumulations=n_accumulations, communicator='overlapping' if mode == 'double buffering'
        else choose('communicator', ['flat', 'naive']))


@dataclasses.dataclass(frozen=True)
class Seed:
    """A seed from which a test draws a program, and the name of a communicator."""

    seed: int
    communicator: str


def seeds(*communicators):
    """Return a strategy that draws a seed and one of these communicators."""
    return st.builds(Seed, st.integers(0, 2**31), st.sampled_from(communicators))
