"""A law of trainers with random extensions: a resumed run matches an uninterrupted run."""

import contextlib
import importlib.util
import io
import itertools
import json
import re

import chainer
import numpy as np
from chainer import functions as F
from chainer import iterators, optimizers
from chainer.training import extensions, triggers
from hypothesis import strategies as st
from killed_jobs import make_iterator, make_saver, run_loop
from laws.law import law, planted
from laws.saves import MARKS, folder_of
from laws.training import state

import chainermn
from chainermn.extensions import (
    AllreducePersistent,
    LinearScaling,
    MultiNodeEarlyStoppingTrigger,
    ObservationAggregator,
    TensorBoardWriter,
    create_multi_node_report,
    observation_aggregator,
)
from chainermn.extensions._checkpointing.parts import SavedParts

pytestmark = MARKS


LENGTH = 11  # iterations


class KilledError(Exception):
    """Ends a training run. Its files remain."""


#: Triggers. Only the first three always fire on all ranks in the same iterations.
TRIGGERS = [
    lambda: (2, 'iteration'), lambda: (3, 'iteration'), lambda: (5, 'iteration'),
    lambda: (1, 'epoch'), lambda: (.4, 'epoch'),
    lambda: triggers.ManualScheduleTrigger([2, 5, 6, 9], 'iteration'),
    lambda: triggers.OnceTrigger(),
    lambda: triggers.MinValueTrigger('main/loss', (2, 'iteration')),
    lambda: triggers.MaxValueTrigger('rare', (3, 'iteration')),
    lambda: triggers.EarlyStoppingTrigger(
        (2, 'iteration'), 'worse', patience=2, max_trigger=(LENGTH, 'iteration'))]
STOPS = {
    'iterations': lambda comm: (LENGTH, 'iteration'),
    'epochs': lambda comm: (2, 'epoch'),
    'early': lambda comm: triggers.EarlyStoppingTrigger(
        (2, 'iteration'), 'worse', patience=2, max_trigger=(LENGTH, 'iteration')),
    'multi-node early': lambda comm: MultiNodeEarlyStoppingTrigger(
        comm, check_trigger=(3, 'iteration'), monitor='worse', patience=1,
        max_trigger=(LENGTH, 'iteration'))}


class SmallModel(chainer.Chain):
    def __init__(self, dropout):
        super().__init__()
        with self.init_scope():
            self.linear = chainer.links.Linear(3, 4)
            self.bn = chainer.links.BatchNormalization(4)
        self.linear.name = 'linear'
        self.dropout = dropout

    def forward(self, x):
        h = self.linear(x)
        if self.dropout:  # even with a ratio of 0, it would draw random numbers
            h = F.dropout(h, self.dropout)
        loss = F.mean((self.bn(h) - 1) ** 2)
        chainer.report({'loss': loss}, self)
        return loss


class Undrawn(extensions.PlotReport):
    @staticmethod
    def available():
        return False


class Total(chainermn.extensions.GenericMultiNodeEvaluator):
    def calc_local(self, x):
        return float(x.sum())

    def aggregate(self, results):
        chainer.report({'total': sum(results)})


def examples_of_evaluator():
    return iterators.SerialIterator(
        np.linspace(0, 1, 9, dtype='f').reshape(3, 3), 2, repeat=False, shuffle=False)


def shift_of(kind, **options):
    """Return a function that creates a schedule with a separate optimizer."""
    def make(comm, model, trigger):
        optimizer = optimizers.SGD(lr=1.).setup(chainer.links.Linear(1, 1))
        shift = kind('lr', optimizer=optimizer, **options)
        shift.rate_of_test = lambda: optimizer.lr
        return shift
    return make


#: Extensions that communicate. Their trigger must fire on all ranks.
COLLECTIVE = {
    'multi-node log': lambda comm, model, trigger: create_multi_node_report(
        extensions.LogReport(trigger=trigger), comm),
    'print': lambda comm, model, trigger: extensions.PrintReport(
        ['main/loss'], create_multi_node_report(
            extensions.LogReport(trigger=trigger, log_name=None), comm), out=io.StringIO()),
    'plot': lambda comm, model, trigger: create_multi_node_report(
        Undrawn(['main/loss', 'rare'], trigger=trigger), comm),
    'bar': lambda comm, model, trigger: create_multi_node_report(
        extensions.ProgressBar((LENGTH, 'iteration'), out=io.StringIO()), comm),
    'board': lambda comm, model, trigger: TensorBoardWriter(comm, trigger=trigger),
    'scaling': lambda comm, model, trigger: LinearScaling(comm, warmup_epochs=1),
    'aggregator': lambda comm, model, trigger: ObservationAggregator(
        comm, 'main/loss', 'all/loss', comm_trigger=trigger),
    'least': lambda comm, model, trigger: ObservationAggregator(
        comm, 'rare', 'least', comm_trigger=trigger,
        aggregator=lambda by_rank: min(itertools.chain(*by_rank))),
    'persistent': lambda comm, model, trigger: AllreducePersistent(model, comm),
    'total': lambda comm, model, trigger: Total(comm, examples_of_evaluator(), model),
    'evaluator': lambda comm, model, trigger: chainermn.create_multi_node_evaluator(
        extensions.Evaluator(examples_of_evaluator(), model), comm)}
EXTENSIONS = {
    **COLLECTIVE,
    'log': lambda comm, model, trigger: extensions.LogReport(trigger=trigger, log_name=None),
    'average': lambda comm, model, trigger: extensions.MicroAverage(
        'main/loss', 'sum', 'average', trigger),
    'statistics': lambda comm, model, trigger: extensions.ParameterStatistics(
        model.linear, {'mean': np.mean}, trigger=trigger),
    'best': lambda comm, model, trigger: extensions.snapshot_object(model, f'best{comm.rank}'),
    'rate': lambda comm, model, trigger: extensions.observe_lr(),
    'exponential': shift_of(extensions.ExponentialShift, rate=.9),
    'inverse': shift_of(extensions.InverseShift, gamma=.1, power=.5),
    'linear': shift_of(extensions.LinearShift, value_range=(.1, .01), time_range=(2, 9)),
    'multistep': shift_of(extensions.MultistepShift, gamma=.1, step_value=[2, 5], init=.5),
    'polynomial': shift_of(extensions.PolynomialShift, rate=.5, max_count=20),
    'step': shift_of(extensions.StepShift, gamma=.5, step=2),
    'warm-up': shift_of(extensions.WarmupShift, warmup_start=.01, warmup_iter=6, init=.1)}
if importlib.util.find_spec('tensorboardX') is None:
    del EXTENSIONS['board']


@st.composite
def trainers(draw):
    def choose(*values):
        return draw(st.sampled_from(values))

    how = choose('checkpointer', 'checkpointer', 'dictionary', 'snapshot')
    # A snapshot contains neither random states nor the data order of each rank.
    data = choose(*['scattered', 'sampler'] if how == 'snapshot' else [
        'scattered', 'uneven', 'sampler', 'multi-node', 'synchronized'])
    kind = choose('serial', 'serial', 'thread', 'thread', 'process')
    return dict(
        how=how, data=data, kind=kind, batch=choose(1, 2, 3, 4),
        shuffle=data in ('synchronized', 'sampler') or (
            how != 'snapshot' and choose(True, False)),
        # A thread of MultiprocessIterator draws random numbers at any time.
        dropout=0 if how == 'snapshot' or kind == 'process' else .3,
        extensions=draw(st.lists(st.tuples(
            st.sampled_from([*EXTENSIONS]), *[st.integers(0, len(TRIGGERS) - 1)] * 2), max_size=16,
            min_size=6, unique_by=lambda each: each[0])),
        # With uneven data and a stop by epochs, the ranks would stop in different iterations.
        stop=choose('iterations', *['epochs'] * (data != 'uneven'), 'multi-node early', 'early'),
        kills=sorted(draw(st.sets(st.integers(1, LENGTH), min_size=1, max_size=2))),
        interval=choose(1, 2, 3), load_after=draw(st.lists(
            st.integers(0, 16), min_size=3, max_size=3)))


class Job:
    """A process of each rank: it resumes from the last checkpoint and trains until it is killed.

    Args:
        comm: The communicator.
        folder: Folder of the checkpoints.
        case: The random program.
        rows: Dict to which each iteration adds its observations and learning rates.
    """

    def __init__(self, comm, folder, case, rows):
        self.comm, self.folder, self.case, self.rows, self.rates = comm, folder, case, rows, []
        np.random.seed(comm.rank)
        n = 7 * comm.size - (case['data'] == 'uneven')
        examples = np.random.RandomState(5).normal(0, 1, (n, 3)).astype('f')
        self.iterator = make_iterator(comm, examples, case)
        self.model = SmallModel(case['dropout'])
        self.optimizer = chainermn.create_multi_node_optimizer(
            optimizers.MomentumSGD(), comm, compare_settings=False).setup(self.model)

    def run(self, end, load_after, is_saved=True):
        """Train until an iteration. Return the remaining state by name."""
        saver = make_saver(self.comm, self.folder, self.case['how'])
        if self.case['how'] == 'dictionary':
            target = {'optimizer': self.optimizer, 'model': self.model, 'iterator': self.iterator}
            run_loop(saver, target, lambda batch: self.optimizer.update(
                self.model, chainer.dataset.concat_examples(batch)), min(end, LENGTH),
                self.case['interval'] if is_saved else 2 * LENGTH)
        else:
            target = trainer = chainer.training.Trainer(
                chainer.training.StandardUpdater(self.iterator, self.optimizer),
                STOPS[self.case['stop']](self.comm), out=self.folder)
            self.extend(trainer, saver, load_after, is_saved)
            trainer.extend(lambda trainer: self.write(trainer, end), name='journal',
                           trigger=(1, 'iteration'), priority=-2000)
            with contextlib.suppress(KilledError):
                trainer.run(show_loop_exception_msg=False)
            if self.case['how'] == 'checkpointer':
                saver._saver.lock.release()
        left = left_by(target)
        if self.case['dropout']:
            left['random'] = np.random.get_state()[1].tobytes()
        self.iterator.finalize()
        self.comm.barrier()
        return left

    def write(self, trainer, end):
        self.rows[trainer.updater.iteration] = {
            **{key: np.asarray(getattr(value, 'array', value), 'd').tolist()
               for key, value in trainer.observation.items()},
            'rates': [rate() for rate in self.rates], 'rate': self.optimizer.lr}
        if trainer.updater.iteration == end:
            raise KilledError

    def extend(self, trainer, saver, load_after, is_saved):
        def observe(trainer):
            t = trainer.updater.iteration
            values = {'count': t, 'sum': 1.5, 'worse': np.float32(1 / 3 if t < 4 else t)}
            chainer.report(values | ({'rare': np.float32(np.sin(t))} if t % 5 in (1, 2, 4) else {}))

        if is_saved:
            trainer.extend(saver, trigger=(self.case['interval'], 'iteration'))
        trainer.extend(observe, name='observe', priority=1000, trigger=(1, 'iteration'))
        added = self.case['extensions']
        for n, (name, inner, outer) in enumerate([*added, (None, 0, 0)]):
            if self.case['how'] == 'checkpointer' and is_saved and n == min(load_after, len(added)):
                saver.maybe_load(trainer, self.optimizer)
            if name is None:
                return
            if name in COLLECTIVE:
                inner, outer = inner % 3, outer % 3
            extension = EXTENSIONS[name](self.comm, self.model, TRIGGERS[inner]())
            if hasattr(extension, 'rate_of_test'):
                self.rates.append(extension.rate_of_test)
            # The other extensions have their own triggers and are called in each iteration.
            options = {'trigger': TRIGGERS[outer]()} if name in (
                'persistent', 'evaluator', 'total', 'best', 'rate') or 'Shift' in type(
                    extension).__name__ else {}
            trainer.extend(extension, name=name, **options)


def left_by(target):
    """Return the serialized state, except for times and for orders that were drawn in advance."""
    left, values = {}, state(SavedParts(target).whole)
    for key, value in values.items():
        if key.endswith('/order'):
            value = value[int(values[f'{key[:-5]}current_position']):]  # skip used samples
        if key.endswith('/_log'):
            value = np.asarray(json.dumps([
                {name: entry[name] for name in entry if name != 'elapsed_time'}
                for entry in json.loads(str(value))]))
        if not re.search('elapsed_time|next_orders|order_(keys|position)|'
                         'triggers/(run|journal)/|[sS]napshot', key):
            left[key] = f'{value.dtype} {value.shape} {value.tolist()!r}'
    return left


@law(trainers(), planted(observation_aggregator, '_save_values', lambda save: (
    lambda serializer, values: save(serializer, values[:-1] or values))))
def test_resumed_trainer(comm, program, tmp_path):
    """A resumed Trainer has the logs, learning rates, stop and state of an uninterrupted one."""
    expected_rows, rows = {}, {}
    expected = Job(comm, folder_of(comm, tmp_path), program, expected_rows).run(
        2 * LENGTH, 99, is_saved=False)
    folder = folder_of(comm, tmp_path)
    for end, load_after in zip([*program['kills'], 2 * LENGTH], program['load_after'],
                               strict=False):
        left = Job(comm, folder, program, rows).run(end, load_after)
    if program['how'] == 'snapshot':  # a snapshot has the logs and batch statistics of one rank
        expected, left = ({key: value for key, value in each.items() if key.startswith(
            'updater/') and '/bn/avg' not in key} for each in (expected, left))
    else:
        assert rows == expected_rows
    different = {key: (expected.get(key), left.get(key)) for key in {*expected, *left}
                 if expected.get(key) != left.get(key)}
    assert not different, different
