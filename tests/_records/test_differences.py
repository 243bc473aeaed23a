"""Planted causes: ``chainermn compare`` finds the first difference between two runs."""

import contextlib
import dataclasses
import random

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizer_hooks

import chainermn
from chainermn._records import differences, run_record, settings
from chainermn._records.read import RecordedRun

N, SIZE, UPDATES, AT = 48, 6, 8, 5  # examples of a rank, of a batch; updates; of a cause


@pytest.fixture
def folder(naive, tmp_path):
    return tmp_path.__class__(naive.bcast_obj(str(tmp_path)))


class Program:
    """A training; causes replace its methods and attributes."""

    def __init__(self, comm):
        self.comm, self.rank = comm, comm.rank
        self.last = comm.size - 1  # the rank on which some causes are
        self.options, self.size, self.config = {}, SIZE, {'dtype': np.dtype('f')}
        self.details, self.updates, self.noise = 1, UPDATES, .1

    def is_last(self):
        return self.rank == self.last

    def seed(self):
        np.random.seed(7)
        random.seed(7)

    def model(self):
        init = chainer.initializers.Normal(.3, rng=np.random.RandomState(3))
        return chainer.Sequential(
            L.Linear(5, 20, initialW=init), self.activation, lambda x: F.dropout(x, self.ratio()),
            L.Linear(20, 3, initialW=init))

    activation = staticmethod(F.tanh)

    def ratio(self):
        return .3

    def optimizer(self):
        return chainer.optimizers.MomentumSGD(.05)

    def configure(self, optimizer):
        """Add hooks."""

    def data(self):
        draw = np.random.RandomState(100 + self.rank)
        return draw.randn(N, 5).astype('f'), draw.randint(0, 3, N)

    def order(self):
        return np.random.RandomState(5).permutation(N)

    def indices(self, number):
        start = (number - 1) * self.size % N
        return self.order()[start:start + self.size]

    def transform(self, x, number):
        return x + np.float32(random.gauss(0, self.noise))

    def loss(self, x, t):
        return F.softmax_cross_entropy(self.net(F.cast(x, chainer.get_dtype())), t)

    def before(self, optimizer, number):
        """Do something between two updates."""

    def run(self, folder):
        with contextlib.ExitStack() as stack:
            for name, value in self.config.items():
                stack.enter_context(chainer.using_config(name, value))
            return self.recorded(folder)

    def recorded(self, folder):
        self.seed()
        x, t = self.data()
        self.net = self.model()
        optimizer = chainermn.create_multi_node_optimizer(
            self.optimizer(), self.comm, **self.options).setup(self.net)
        self.configure(optimizer)
        recording = run_record.record(optimizer, str(folder), self.details)
        optimizer.update(self.loss, x[:2], t[:2])  # copies
        for number in range(1, self.updates + 1):
            self.before(optimizer, number)
            indices = self.indices(number)
            optimizer.update(self.loss, self.transform(x[indices], number), t[indices])
        recording.close()
        self.comm.mpi_comm.Barrier()
        return RecordedRun(folder)


@dataclasses.dataclass
class Cause:
    """A change of the program, and what is to be found."""

    what: str
    update: int
    change: object  # of the program; it returns a dict of replaced attributes, or None
    is_of_last: bool = False  # on the last rank only
    note: str = ''
    setting: str = ''
    noise: float = .1  # of the data


def replaced(**methods):
    """Return a change that replaces methods; each gets the program, the old method, arguments."""
    def change(program):
        for name, method in methods.items():
            old = getattr(program, name)
            setattr(program, name, lambda *args, method=method, old=old: method(
                program, old, *args))
    return change


def attributes(**values):
    def change(program):
        for name, value in values.items():
            setattr(program, name, value)
    return change


def on_last(method):
    """Return the method, which only the last rank replaces."""
    return lambda p, old, *args: method(p, old, *args) if p.is_last() else old(*args)


def seeded(function, at=None):
    def seed(program, old):
        old()
        function(99)
    return seed


def at(number, method):
    """Return a method before an update."""
    return replaced(before=lambda p, old, optimizer, n: method(p, optimizer) if n == number
                    else None)


def changed_value(x, row, value):
    x = x.copy()
    x[row] = value
    return x


class Doubled(chainer.FunctionNode):
    """Has a wrong gradient."""

    def forward(self, inputs):
        return inputs[0] * 1,

    def backward(self, indexes, gys):
        return gys[0] * 2,


def hooked(hook):
    return replaced(configure=lambda p, old, optimizer: optimizer.add_hook(hook(), 'added'))


def in_dtype(dtype):
    return attributes(config={'dtype': dtype if dtype is chainer.mixed16 else np.dtype(dtype)})


def freeze(p, optimizer):
    p.net[0].W.update_rule.enabled = False


def overwrite(p, optimizer):
    p.net[3].b.array[0] += .25


def set_rate(p, optimizer):
    optimizer.lr *= 1.5


def sort_files(p, old):
    x, t = old()
    return x[::-1], t[::-1]


BATCH, LOSS, BEFORE = 'the batch', 'the loss', 'the parameters before the update'
NUMPY, PYTHON = 'random numbers of numpy.random', 'random numbers of the module random'
PARAMETERS, MEAN = 'the parameters after', 'the mean gradients'
OWN = 'gradients'  # of the rank; one rank alone has no others
ROUNDED = '16 explains differences of up to 1e-02.'
ROUNDING = 'rounding'  # of the loss or the gradients, maybe on one rank only
INITIAL = 'the initial parameters'
SHIFTED = f"A uses B's batch in update {AT + 1} of "

CAUSES = {
    'seed of one rank': Cause(NUMPY, 1, replaced(seed=on_last(seeded(np.random.seed))), True),
    'seed of all': Cause(NUMPY, 1, replaced(seed=seeded(np.random.seed)), note=LOSS),
    'seed of random': Cause(PYTHON, 1, replaced(seed=on_last(seeded(random.seed))), True, BATCH),
    'numbers drawn by a log': Cause(NUMPY, AT, at(AT, lambda p, o: np.random.rand())),
    'numbers drawn on one rank': Cause(
        PYTHON, AT, at(AT, lambda p, o: p.is_last() and random.random()), True),
    'order of files': Cause(BATCH, 1, replaced(data=sort_files)),
    'another shuffle': Cause(BATCH, 1, replaced(
        order=lambda p, old: np.random.RandomState(6).permutation(N))),
    'shuffle of one rank': Cause(BATCH, 1, replaced(order=on_last(
        lambda p, old: np.random.RandomState(6).permutation(N))), True),
    'a batch lost': Cause(BATCH, AT, replaced(
        indices=lambda p, old, n: old(n + (n >= AT))), note=SHIFTED, noise=0.),
    'a batch twice': Cause(BATCH, AT, replaced(indices=lambda p, old, n: old(n - (n >= AT)))),
    'one value': Cause(BATCH, AT, replaced(transform=on_last(
        lambda p, old, x, n: changed_value(old(x, n), 2, 1.) if n == AT else old(x, n))), True),
    'order in the batch': Cause(BATCH, AT, replaced(
        indices=lambda p, old, n: old(n)[::-1] if n == AT else old(n)),
        note='same examples, in a different order'),
    'a normalization': Cause(BATCH, 1, replaced(
        transform=lambda p, old, x, n: old(x, n) / np.float32(1.01))),
    'float64 data': Cause(BATCH, 1, replaced(
        transform=lambda p, old, x, n: old(x, n).astype('d'),
        loss=lambda p, old, x, t: old(F.cast(x, 'f'), t))),
    'augmentation with its own seed': Cause(BATCH, 1, replaced(
        transform=lambda p, old, x, n: old(x, n) + np.float32(
            np.random.RandomState().rand()))),
    'a reader that stops': Cause(BATCH, AT, replaced(
        indices=on_last(lambda p, old, n: old(min(n, AT - 1)))), True),
    'batch size': Cause(BATCH, 1, attributes(size=4)),
    'initializer': Cause(INITIAL, 0, replaced(model=lambda p, old: changed_model(old(), .5)),
                         note='1 of 4 parameters differ, such as /0/W'),
    'an initial bias': Cause(INITIAL, 0, replaced(model=lambda p, old: changed_bias(old())),
                             note='/1/b'),
    'a wider layer': Cause(INITIAL, 0, replaced(model=lambda p, old: wider(p)),
                           note='(20, 5) float32 | (21, 5) float32'),
    'rate of one update': Cause(PARAMETERS, AT, at(AT, set_rate),
                                note='the hyperparameter lr: 0.05 | 0.075'),
    'rate': Cause(PARAMETERS, 1, replaced(
        optimizer=lambda p, old: chainer.optimizers.MomentumSGD(.06)),
        setting='hyperparameter lr'),
    'momentum': Cause(PARAMETERS, 2, replaced(
        optimizer=lambda p, old: chainer.optimizers.MomentumSGD(.05, .8)),
        setting='hyperparameter momentum'),
    'optimizer': Cause(PARAMETERS, 1, replaced(
        optimizer=lambda p, old: chainer.optimizers.Adam()), setting='optimizer'),
    'weight decay': Cause(PARAMETERS, 1, hooked(lambda: optimizer_hooks.WeightDecay(.01)),
                          setting='hooks'),
    'clipping': Cause(PARAMETERS, 1, hooked(lambda: optimizer_hooks.GradientClipping(.1)),
                      setting='hooks'),
    'a frozen parameter': Cause(PARAMETERS, AT, at(AT, freeze), note='the parameter /0/W (of '),
    'a hook on one rank': Cause(PARAMETERS, 1, lambda p: (
        attributes(options={'compare_settings': False})(p),
        replaced(configure=on_last(lambda p, old, optimizer: optimizer.add_hook(
            optimizer_hooks.WeightDecay(.1), 'own')))(p)), True),
    'dropout ratio': Cause(LOSS, 1, replaced(ratio=lambda p, old: .4),
                           note='the output of Dropout'),
    'no dropout from an update on': Cause(LOSS, AT, at(
        AT, lambda p, o: setattr(p, 'ratio', lambda: 0.)), note='the output of Dropout'),
    'activation': Cause(LOSS, 1, replaced(activation=lambda p, old, x: F.relu(x)),
                        note='A calls Tanh at test_differences.py:'),
    'float64 somewhere': Cause(ROUNDING, 1, replaced(
        activation=lambda p, old, x: F.cast(F.tanh(F.cast(x, 'd')), 'f')), note='where B calls'),
    'a scaled loss': Cause(LOSS, 1, replaced(loss=lambda p, old, x, t: old(x, t) * 2)),
    'loss of one rank': Cause(LOSS, 1, replaced(
        loss=on_last(lambda p, old, x, t: old(x, t) * 2)), True),
    'a wrong gradient': Cause(OWN, 1, replaced(
        activation=lambda p, old, x: Doubled().apply((old(x),))[0]), note='gradient of /0/W'),
    'compression': Cause(MEAN, 1, attributes(options={'compression': 'fp16'})),
    'parameters between updates': Cause(BEFORE, AT, at(AT, overwrite),
                                        note='the parameter /1/b (of '),
    'parameters of one rank': Cause(
        BEFORE, AT, at(AT, lambda p, o: p.is_last() and overwrite(p, o)), True,
        'the parameter /1/b (of '),
    'accumulation': Cause(PARAMETERS, 1, attributes(options={'n_accumulations': 2})),
    'another communicator': Cause('', 0, lambda p: setattr(
        p, 'comm', chainermn.create_communicator('flat')), setting='communicator'),
    'float16': Cause(ROUNDING, 1, in_dtype('e'), note=ROUNDED, setting='dtypes of the parameters'),
    'mixed precision': Cause(ROUNDING, 1, in_dtype(chainer.mixed16), note=ROUNDED),
    'float64': Cause(ROUNDING, 1, in_dtype('d'), note='Rounding to float32 explains'),
    'float16, and another activation': Cause(LOSS, 1, lambda p: (in_dtype('e')(p), replaced(
        activation=lambda p, old, x: F.relu(x))(p)), note='A calls Tanh at test_differences.py:'),
    'rounded gradients': Cause(ROUNDING, 1, attributes(options={'compression': 'bf16'}),
                               note='Rounding to Bf16 explains', setting='compression'),
    'a setting of Chainer': Cause('', 0, replaced(loss=lambda p, old, x, t: with_setting(
        old, x, t)), setting=''),
}


def changed_model(net, factor):
    net[0].W.array *= factor
    return net


def changed_bias(net):
    net[3].b.array[1] = .5
    return net


def wider(program):
    return chainer.Sequential(L.Linear(5, 21), F.tanh, L.Linear(21, 3))


def with_setting(old, x, t):
    with chainer.using_config('type_check', False):
        return old(x, t)


def found(folder, comm, change, noise=.1):
    """Run the program twice; return the records and the differences."""
    first, second = Program(comm), Program(comm)
    first.noise = second.noise = noise
    change(second)
    a, b = first.run(folder / 'a'), second.run(folder / 'b')
    return a, b, differences.between(a, b)


@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.slow] * bool(n % 5))
                                  for n, name in enumerate(CAUSES)])
def test_causes(naive, folder, name):
    cause = CAUSES[name]
    a, b, differing = found(folder, naive, cause.change, cause.noise)
    assert not cause.setting or cause.setting in settings.differing(
        a.ranks['rank0'], b.ranks['rank0'])
    if not cause.what:
        assert differing == []
        return
    assert differing[0].update == cause.update
    if cause.what == ROUNDING:
        assert differing[0].is_rounding
    else:
        assert cause.what in differing[0].what
        assert differing[0].rank == (f'rank{naive.size - 1}' if cause.is_of_last else 'rank0')
        assert cause.update == 0 or len(differing[0].ranks) == (
            1 if cause.is_of_last else naive.size)
    assert any(cause.note in note for note in ['', *differing[0].notes]), differing[0].notes
