"""A run that resumes anywhere continues the logs of an uninterrupted one, for every extension.

One trainer has all extensions and triggers.  It is saved in each iteration, and resumed from all of
these saves: all that they observe, log or change must be equal in each later iteration.
"""
import functools
import io
import itertools
import os
import warnings

import chainer
import numpy as np
import pytest
from chainer import iterators
from chainer.training import extensions, triggers

import chainermn
from chainermn.extensions import (
    AllreducePersistent,
    GenericMultiNodeEvaluator,
    LinearScaling,
    MultiNodeEarlyStoppingTrigger,
    ObservationAggregator,
    TensorBoardWriter,
    create_multi_node_report,
)
from chainermn.iterators import (
    MultiNodeOrderSampler,
    create_multi_node_iterator,
    create_synchronized_iterator,
)

LENGTH = 17  # iterations
INTERVAL = 5, 'iteration'


class Model(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.linear = chainer.links.Linear(2, 3)
            self.bn = chainer.links.BatchNormalization(3)
        self.linear.name = 'linear'

    def forward(self, x):
        h = chainer.functions.dropout(self.bn(self.linear(x)))
        loss = chainer.functions.mean(h * h)
        chainer.report({'loss': loss}, self)
        return loss


def observe(comm):
    """Report values of several types; some only in some iterations."""
    def observe(trainer):
        t = trainer.updater.iteration
        value = np.float32(np.sin(7 * t + comm.rank) / 3)
        chainer.report({'value': value, 'count': t, 'weight': 1.5 + t, 'sum': 0.3 * t,
                        'worse': np.float32(1 / 3 if t < 7 else t), 'array': np.full(2, value)})
        if t % 5 in (1, 2, 4):
            chainer.report({'rare': value * np.float32(1.1)})
    return observe


class Journal:
    """What each extension has done, by iteration and name."""

    def __init__(self, trainer, optimizer, comm):
        self.rows = {}
        self.trainer, self.comm = trainer, comm
        self.probes = {}
        self.fired = {}
        self.main = optimizer

    def write(self, trainer):
        row = self.rows[trainer.updater.iteration] = {
            f'observed {key}': as_bits(value) for key, value in trainer.observation.items()}
        row.update({name: as_bits(probe()) for name, probe in self.probes.items()})
        row.update({f'{name} fires': True for name in self.fired})
        self.fired.clear()

    def add(self, extension, trigger=None, name=None, **options):
        name = name or f'{type(extension).__name__}'
        self.trainer.extend(extension, name=name, trigger=trigger, **options)

    def add_trigger(self, name, trigger):
        """Add an extension that only records when its trigger fires."""
        self.trainer.extend(lambda _: self.fired.setdefault(name), name=name, trigger=trigger)

    def add_shift(self, shift, name, trigger=(2, 'iteration'), **options):
        """Add an extension that shifts the learning rate of its own optimizer."""
        optimizer = chainer.optimizers.SGD(lr=1.).setup(chainer.links.Linear(1, 1))
        self.trainer.extend(shift('lr', optimizer=optimizer, **options), name=name, trigger=trigger)
        self.probes[name] = lambda: optimizer.lr


def as_bits(value):
    """Convert a value for bitwise comparison."""
    value = getattr(value, 'array', value)
    if isinstance(value, (float, int, np.ndarray, np.generic)):
        return np.asarray(value, np.float64).tobytes()
    return repr(value)


def without_time(log):
    return [{key: value for key, value in entry.items() if key != 'elapsed_time'} for entry in log]


def add_triggers(journal):
    for name, trigger in {
        'IntervalTrigger': INTERVAL,
        'IntervalTrigger of epochs': (0.4, 'epoch'),
        'ManualScheduleTrigger': triggers.ManualScheduleTrigger([3, 8, 9], 'iteration'),
        'OnceTrigger': triggers.OnceTrigger(),
        'MaxValueTrigger': triggers.MaxValueTrigger('value', INTERVAL),
        'MinValueTrigger': triggers.MinValueTrigger('rare', INTERVAL),
        'MinValueTrigger of a Variable': triggers.MinValueTrigger('main/loss', INTERVAL),
        'EarlyStoppingTrigger': triggers.EarlyStoppingTrigger(
            (3, 'iteration'), 'worse', patience=2, max_trigger=(LENGTH, 'iteration')),
        'MultiNodeEarlyStoppingTrigger': MultiNodeEarlyStoppingTrigger(
            journal.comm, check_trigger=(3, 'iteration'), monitor='worse', patience=2,
            max_trigger=(LENGTH, 'iteration')),
    }.items():
        journal.add_trigger(name, trigger)


def add_shifts(journal):
    journal.add_shift(extensions.ExponentialShift, 'ExponentialShift', rate=.9)
    journal.add_shift(extensions.ExponentialShift, 'ExponentialShift of ManualScheduleTrigger',
                      triggers.ManualScheduleTrigger([2, 6], 'iteration'), rate=.5)
    journal.add_shift(extensions.InverseShift, 'InverseShift', gamma=.1, power=.5)
    journal.add_shift(extensions.LinearShift, 'LinearShift', value_range=(0, 1), time_range=(1, 6))
    journal.add_shift(extensions.MultistepShift, 'MultistepShift', gamma=.1, step_value=[2, 5],
                      init=.5)
    journal.add_shift(extensions.PolynomialShift, 'PolynomialShift', rate=.5, max_count=20)
    journal.add_shift(extensions.StepShift, 'StepShift', gamma=.5, step=2)
    journal.add_shift(extensions.WarmupShift, 'WarmupShift', warmup_start=.1, warmup_iter=4, init=1)


def add_reports(journal):
    comm, probes = journal.comm, journal.probes
    for name, wrap in {'': lambda x, _: x, 'multi-node ': create_multi_node_report}.items():
        log = wrap(extensions.LogReport(
            trigger=INTERVAL, filename=f'{name}log{comm.rank}'), comm)
        plot = wrap(extensions.PlotReport(['value', 'rare'], trigger=INTERVAL,
                                          filename=f'{name}{comm.rank}.png'), comm)
        own = wrap(extensions.LogReport(['rare'], INTERVAL, filename=f'{name}own{comm.rank}'), comm)
        journal.add(log, name=f'{name}LogReport')
        journal.add(plot, name=f'{name}PlotReport')
        journal.add(extensions.PrintReport(['rare'], own, out=io.StringIO()),
                    name=f'{name}PrintReport')
        probes[f'{name}LogReport'] = lambda log=log: without_time(log.log)
        probes[f'{name}PlotReport'] = lambda plot=plot: [
            list(map(tuple, points)) for points in plot._data.values()]
        probes[f'{name}PrintReport'] = lambda own=own: without_time(own.log)
    journal.add(create_multi_node_report(
        extensions.ProgressBar((LENGTH, 'iteration'), out=io.StringIO()), comm))
    board = TensorBoardWriter(comm, trigger=INTERVAL)
    journal.add(board)
    probes['TensorBoardWriter'] = lambda: without_time(board.log)


def add_observers(journal, model, folder):
    comm = journal.comm
    writer = extensions.snapshot_object(model, f'best.{comm.rank}')
    journal.add(writer, triggers.MaxValueTrigger('rare', INTERVAL), 'snapshot_object')
    journal.add(chainermn.extensions.multi_node_snapshot(
        comm, extensions.snapshot(filename='all_{.updater.iteration}')), INTERVAL, 'snapshot')
    for name, keys in {'int': ('count', 'count'), 'float': ('sum', 'weight'),
                       'Variable': ('main/loss', 'weight')}.items():
        journal.add(extensions.MicroAverage(*keys, f'MicroAverage of {name}', INTERVAL),
                    name=f'MicroAverage of {name}')
    journal.add(extensions.ParameterStatistics(model.linear, trigger=INTERVAL))
    plot = extensions.VariableStatisticsPlot(
        model.linear.W, max_sample_size=4, trigger=(8, 'iteration'), report_grad=False,
        plot_std=False, percentile_sigmas=(), filename=f'statistics{comm.rank}.png')
    journal.add(plot)
    journal.probes['VariableStatisticsPlot'] = lambda: [
        each.tolist() for each in plot._samples.get_data()]
    journal.add(extensions.observe_lr(), INTERVAL, 'observe_lr')
    journal.add(extensions.FailOnNonNumber())
    journal.add(extensions.DumpGraph('main/loss', f'graph{comm.rank}'))
    journal.add(extensions.unchain_variables())
    for key in 'value', 'rare', 'array':
        journal.add(ObservationAggregator(comm, key, f'{key} of all', comm_trigger=INTERVAL),
                    name=f'ObservationAggregator of {key}')
    journal.add(ObservationAggregator(
        comm, 'rare', 'least of all', comm_trigger=INTERVAL,
        aggregator=lambda by_rank: min(map(min, by_rank))), name='ObservationAggregator of min')


def add_evaluators(journal, model):
    data = np.linspace(0, 1, 6, dtype='f').reshape(3, 2)
    evaluator = extensions.Evaluator(
        iterators.SerialIterator(data, 2, repeat=False, shuffle=False), model)
    journal.add(chainermn.create_multi_node_evaluator(evaluator, journal.comm), INTERVAL)

    class Total(GenericMultiNodeEvaluator):
        def calc_local(self, x):
            return float(x.sum())

        def aggregate(self, results):
            chainer.report({'total': sum(results)})

    journal.add(Total(journal.comm, iterators.SerialIterator(data, 2, repeat=False, shuffle=False),
                      model), INTERVAL)
    journal.add(AllreducePersistent(model, journal.comm), INTERVAL)
    # The next update uses its learning rate.
    journal.add(LinearScaling(journal.comm, warmup_epochs=2))


def make(comm, folder, load_first=lambda trainer, optimizer: None):
    np.random.seed(comm.rank)
    model = Model()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(.01), comm).setup(model)
    data = np.random.RandomState(comm.rank).normal(0, 1, (7, 2)).astype('f')
    iterator = iterators.SerialIterator(data, 2)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (LENGTH, 'iteration'), out=folder)
    journal = Journal(trainer, optimizer, comm)
    load_first(trainer, optimizer)
    trainer.extend(observe(comm), name='observe', trigger=(1, 'iteration'), priority=1000)
    trainer.extend(lambda trainer: journal.write(trainer), name='journal',
                   trigger=(1, 'iteration'), priority=-50)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', PendingDeprecationWarning)  # of matplotlib
        add_triggers(journal)
        add_shifts(journal)
        add_reports(journal)
        add_observers(journal, model, folder)
        add_evaluators(journal, model)
    return trainer, optimizer, journal


def remove_after(comm, folder, iteration):
    """Remove later saves, so that this one is loaded."""
    comm.barrier()
    for name in os.listdir(folder) if comm.rank == 0 else ():
        if name.startswith('run.') and int(name.rpartition('.')[2]) > iteration:
            os.remove(os.path.join(folder, name))
    comm.barrier()


def differences(rows, expected):
    """Return the names whose values differ, each with the first such iteration."""
    found = {}
    for iteration, row in sorted(rows.items()):
        for name in {*row, *expected[iteration]}:
            if row.get(name) != expected[iteration].get(name):
                found.setdefault(name, iteration)
    return found


def save_all(comm, trainer):
    """Train, and save each iteration, as if the run had been killed after the last one."""
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm, cp_interval=100)
    checkpointer.finalize = lambda: None
    trainer.extend(checkpointer, trigger=(1, 'iteration'))
    trainer.run()
    checkpointer._saver.wait()


def load(comm, folder, start, *args):
    remove_after(comm, folder, start)
    np.random.seed(99)
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm, path=folder)
    if hasattr(args[0], 'extend'):
        checkpointer.finalize = lambda: None
        args[0].extend(checkpointer, trigger=(1000, 'iteration'))
    assert checkpointer.maybe_load(*args) == start


@pytest.mark.limit(120)
@pytest.mark.parametrize('starts', [
    pytest.param([9], marks=pytest.mark.slow),
    pytest.param([4, 14], marks=pytest.mark.slow),
    pytest.param(range(1, LENGTH), marks=pytest.mark.full)])
def test_every_extension_and_trigger(comm, folder, starts):
    pytest.importorskip('matplotlib').use('Agg')
    pytest.importorskip('tensorboardX', exc_type=ImportError)
    trainer, _, expected = make(comm, folder)
    trainer.run()
    trainer, _, saved = make(comm, folder)
    save_all(comm, trainer)
    assert not differences(saved.rows, expected.rows)

    failed = {}
    for start, loads_first in itertools.product(reversed(starts), [False, True]):
        load_now = functools.partial(load, comm, folder, start)
        if loads_first:  # as in the example of version 7
            trainer, optimizer, resumed = make(comm, folder, load_now)
        else:
            trainer, optimizer, resumed = make(comm, folder)
            load_now(trainer, optimizer)
        trainer.run()
        assert list(resumed.rows) == list(range(start + 1, LENGTH + 1))
        for name, iteration in differences(resumed.rows, expected.rows).items():
            failed.setdefault(name, []).append(
                f'from {start} in {iteration}' + ', loaded first' * loads_first)
    assert not failed, '\n'.join(f'{name}: {runs}' for name, runs in sorted(failed.items()))


STOP_TRIGGERS = {
    'iterations': lambda comm: (6, 'iteration'),
    'epochs': lambda comm: (2, 'epoch'),
    'EarlyStoppingTrigger': lambda comm: triggers.EarlyStoppingTrigger(
        (2, 'iteration'), 'worse', patience=2, max_trigger=(LENGTH, 'iteration')),
    'MultiNodeEarlyStoppingTrigger': lambda comm: MultiNodeEarlyStoppingTrigger(
        comm, check_trigger=(2, 'iteration'), monitor='worse', patience=2,
        max_trigger=(LENGTH, 'iteration')),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize('name', STOP_TRIGGERS)
def test_every_stop_trigger(comm, folder, name):
    """Also from the iteration in which it fires: a completed training stays complete."""
    def make():
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(.01), comm).setup(Model())
        iterator = iterators.SerialIterator(np.ones((6, 2), 'f'), 2)
        trainer = chainer.training.Trainer(
            chainer.training.StandardUpdater(iterator, optimizer), STOP_TRIGGERS[name](comm),
            out=folder)
        trainer.extend(observe(comm), name='observe', trigger=(1, 'iteration'), priority=1000)
        return trainer, optimizer

    trainer, _ = make()
    save_all(comm, trainer)
    end = trainer.updater.iteration
    assert end < LENGTH
    for start in range(end, 0, -1):
        trainer, optimizer = make()
        load(comm, folder, start, trainer, optimizer)
        trainer.run()
        assert trainer.updater.iteration == end, start


N = 8


def multithread(data, **options):
    return iterators.MultithreadIterator(data, 3, **options)


def multiprocess(data, **options):
    return iterators.MultiprocessIterator(data, 3, n_processes=1, n_prefetch=2, shared_mem=100,
                                          **options)


def serial(data, **options):
    return iterators.SerialIterator(data, 3, **options)


ITERATORS = {
    '{}': lambda kind, comm: kind(range(N)),
    '{} that does not shuffle': lambda kind, comm: kind(range(N), shuffle=False),
    '{} with a random state': lambda kind, comm: kind(
        range(N), order_sampler=iterators.ShuffleOrderSampler(np.random.RandomState(7))),
    '{} with MultiNodeOrderSampler': lambda kind, comm: kind(
        range(N), order_sampler=MultiNodeOrderSampler(N, comm)),
    'multi-node {}': lambda kind, comm: create_multi_node_iterator(kind(range(N)), comm),
    'synchronized {}': lambda kind, comm: create_synchronized_iterator(kind(range(N)), comm),
}


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize('name', ITERATORS)
@pytest.mark.parametrize('kind', [serial, multithread, multiprocess])
def test_every_iterator(comm, folder, kind, name):
    """After the last batch of an epoch, the order of the next may have been drawn in advance."""
    def run(n, start=0):
        np.random.seed(3)
        iterator = ITERATORS[name](kind, comm)
        state = {'iterator': iterator}
        if start:
            load(comm, folder, start, state)
        batches = []
        for iteration in range(start + 1, n + 1):
            batches.append((iterator.next(), iterator.epoch, iterator.is_new_epoch,
                            iterator.epoch_detail))
            if not start and n < 12:
                checkpointer.save(state, iteration)
        iterator.finalize()
        return batches

    checkpointer = chainermn.create_multi_node_checkpointer(
        'run', comm, cp_interval=100, path=folder)
    expected = run(12)
    assert run(9) == expected[:9]  # saving changes nothing
    checkpointer._saver.lock.release()
    starts = {2, 5, 7} if kind is multiprocess else range(1, 10)
    for start in sorted(starts, reverse=True):
        assert run(12, start) == expected[start:], start
    if 'synchronized' in name or 'multi-node' in name:
        assert comm.bcast_obj(expected) == expected
