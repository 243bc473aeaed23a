"""Laws of saves: a training that is saved and resumed is one that was not interrupted."""

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import json
import os
import random
import re
import shutil
import threading
import unittest.mock

import chainer
import numpy as np
import pytest
from chainer import functions as F
from chainer import iterators, optimizers
from chainer.training import extensions, triggers
from hypothesis import strategies as st
from killed_jobs import make_iterator, make_saver, new_folder, run_loop, some_of
from laws.blocks import BLOCKS
from laws.law import law, planted
from laws.programs import OPTIMIZERS, STEPS, programs
from laws.training import Training, state

import chainermn
from chainermn.extensions import (
    AllreducePersistent,
    LinearScaling,
    MultiNodeEarlyStoppingTrigger,
    ObservationAggregator,
    TensorBoardWriter,
    create_multi_node_report,
    multi_node_snapshot,
    observation_aggregator,
)
from chainermn.extensions import _multi_node_snapshot as snapshot_module
from chainermn.extensions import checkpoint as checkpoint_module
from chainermn.extensions._checkpointing import (
    late_copies,
    rank_file,
    resume,
)
from chainermn.extensions._checkpointing import state as saved_state

pytestmark = [
    pytest.mark.limit(120),
    pytest.mark.filterwarnings('ignore:overflow', 'ignore:invalid value', 'ignore:divide by zero',
                               'ignore:Non finite', 'ignore:iteration .* was saved by',
                               'ignore:A batch with no more than one sample')]

#: What programs do between steps, and a new process does again, or a save has.
EVENTS = ['', 'exception', 'hyperparameter', 'scale', 'enable', 'rule hook', 'hook', 'add']


@pytest.fixture(autouse=True)
def small_states_are_copied_late(monkeypatch):
    """Models are small here."""
    monkeypatch.setattr(late_copies, '_SMALL', 0)


def folder_of(comm, tmp_path):
    """Return a new folder, the same on all ranks."""
    return new_folder(comm, comm.bcast_obj(str(tmp_path)))


def checkpointer_of(comm, folder, **options):
    return chainermn.create_multi_node_checkpointer('run', comm, path=folder, **options)


def killed(saver):
    """Let a checkpointer be as after a job that was killed, but with all of its files."""
    saver._saver.flush()
    saver._saver.lock.release()


def assert_same(found, expected):
    """Compare lists and dictionaries of arrays and numbers, bit by bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value, key)
    else:
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            if isinstance(other, (dict, list)):
                assert_same(one, other)
            else:
                assert one == other, (step, one, other)


# --- the same number of ranks -----------------------------------------------------------------

class Saved(Training):
    """A training that a checkpointer saves before one of the steps, and new objects resume.

    Args:
        program: The program.
        comm: The communicator.
        folder: Folder of the saves; if ``None``, the training is not interrupted.
    """

    def __init__(self, program, comm, folder=None):
        self.folder, self.at = folder, program.seed % (STEPS + 1) if folder else None
        super().__init__(program, comm)

    def update(self, number):
        np.random.normal(), random.gauss(0, 1)  # each keeps a second number in store
        super().update(number)

    def happen(self, step):
        if step == self.at:
            self.resume()
        super().happen(step)

    def wait(self):
        """The checkpointer waits."""

    def resume(self):
        old = self.optimizer
        saver = checkpointer_of(self.comm, self.folder)
        saver.save({'model': old.target, 'optimizer': old}, self.at)
        killed(saver)
        super().resume()

    def transfer(self, old, new):
        saver = checkpointer_of(self.comm, self.folder)
        assert saver.maybe_load({'model': new.target, 'optimizer': new}) == self.at
        saver._saver.lock.release()

    def run(self):
        history = super().run()
        if self.at == STEPS:
            self.resume()
        # After loading, each rank has complete states until an update shares them again.
        for number in range(STEPS, STEPS + self.program.n_accumulations):
            self.update(number)
        if hasattr(self.optimizer, 'wait'):
            self.optimizer.wait()
        return [*history, state(self.optimizer.target), state(self.optimizer),
                np.random.normal(), random.gauss(0, 1)]


def without_stored_number(capture):
    def changed():
        arrays = capture()
        arrays['chainermn/random/numpy/position'][1] = 0
        return arrays
    return changed


# Snapshots contain persistent values only, as in Chainer.
@law(programs(events=EVENTS, blocks=sorted(BLOCKS.keys() - {'Counter', 'Memory'}),
              batches=[3, 2], is_fp32=False),
     planted(saved_state, 'capture_random', without_stored_number))
def test_resumed_training(comm, program, tmp_path):
    """Checkpointer: a resumed training has the bits of one that was not interrupted."""
    expected = Saved(program, comm).run()
    assert_same(Saved(program, comm, folder_of(comm, tmp_path)).run(), expected)


# --- a Trainer --------------------------------------------------------------------------------

LENGTH = 11  # iterations


class KilledError(Exception):
    """Ends a training, whose files stay."""


#: All but the first three may fire on some ranks only.
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
        if self.dropout:  # with a ratio of 0 it would draw numbers, too
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
    """Return a function that makes a schedule of an optimizer of its own."""
    def make(comm, model, trigger):
        optimizer = optimizers.SGD(lr=1.).setup(chainer.links.Linear(1, 1))
        shift = kind('lr', optimizer=optimizer, **options)
        shift.rate_of_test = lambda: optimizer.lr
        return shift
    return make


#: Those that communicate get a trigger that fires on all ranks.
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
    # A snapshot has neither random numbers nor the data order of each rank.
    data = choose(*['scattered', 'sampler'] if how == 'snapshot' else [
        'scattered', 'uneven', 'sampler', 'multi-node', 'synchronized'])
    kind = choose('serial', 'serial', 'thread', 'thread', 'process')
    return dict(
        how=how, data=data, kind=kind, batch=choose(1, 2, 3, 4),
        shuffle=data in ('synchronized', 'sampler') or (
            how != 'snapshot' and choose(True, False)),
        # The thread of MultiprocessIterator draws random numbers at any time.
        dropout=0 if how == 'snapshot' or kind == 'process' else .3,
        extensions=draw(st.lists(st.tuples(
            st.sampled_from([*EXTENSIONS]), *[st.integers(0, len(TRIGGERS) - 1)] * 2), max_size=16,
            min_size=6, unique_by=lambda each: each[0])),
        # The ranks would stop at different iterations.
        stop=choose('iterations', *['epochs'] * (data != 'uneven'), 'multi-node early', 'early'),
        kills=sorted(draw(st.sets(st.integers(1, LENGTH), min_size=1, max_size=2))),
        interval=choose(1, 2, 3), load_after=draw(st.lists(
            st.integers(0, 16), min_size=3, max_size=3)))


class Job:
    """A process of each rank: it resumes from the last save, and trains until it is killed.

    Args:
        comm: The communicator.
        folder: Where the saves are.
        case: The random program.
        rows: Gets what can be observed, by iteration.
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
        """Return all that is left after an iteration, by name."""
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
            # Others have a trigger in them, and are called in each iteration.
            options = {'trigger': TRIGGERS[outer]()} if name in (
                'persistent', 'evaluator', 'total', 'best', 'rate') or 'Shift' in type(
                    extension).__name__ else {}
            trainer.extend(extension, name=name, **options)


def left_by(target):
    """Return all that the objects serialize, but no times, and no orders drawn in advance."""
    left, values = {}, state(saved_state.as_serializable(target))
    for key, value in values.items():
        if key.endswith('/order'):
            value = value[int(values[f'{key[:-5]}current_position']):]  # the others were used
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
    """A resumed Trainer: the same logs, learning rates, stop and state as one without an end."""
    expected_rows, rows = {}, {}
    expected = Job(comm, folder_of(comm, tmp_path), program, expected_rows).run(
        2 * LENGTH, 99, is_saved=False)
    folder = folder_of(comm, tmp_path)
    for end, load_after in zip([*program['kills'], 2 * LENGTH], program['load_after'],
                               strict=False):
        left = Job(comm, folder, program, rows).run(end, load_after)
    if program['how'] == 'snapshot':  # it has the logs and the batch normalization of one rank
        expected, left = ({key: value for key, value in each.items() if key.startswith(
            'updater/') and '/bn/avg' not in key} for each in (expected, left))
    else:
        assert rows == expected_rows
    different = {key: (expected.get(key), left.get(key)) for key in {*expected, *left}
                 if expected.get(key) != left.get(key)}
    assert not different, different


# --- another number of ranks ------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Resized:
    """A training in several jobs; see ``Program`` for the fields that are the same.

    Attributes:
        jobs: Of each: a number from which follows on how many ranks it runs, its number of updates,
            and whether it shards the states.
    """

    seed: int
    jobs: tuple[tuple[int, int, bool], ...]
    optimizer: str
    is_scaled: bool
    n_accumulations: int
    mode: str
    communicator: str = 'overlapping'

    def gradients(self, update, rank, size):
        """Return a gradient, whose mean over all ranks does not depend on their number."""
        mean = np.random.RandomState([self.seed, update]).randint(-8, 9, (len(NAMES), 3)) / 4
        found = [*(mean + (2. * rank - (size - 1)) / 4)]
        if update % 2:  # only one rank uses this parameter
            found[0] = None if rank else mean[0] * size
        return found


#: Parameters that have the names of what is saved beside them.
NAMES = ['count', 'loss_scale', 'means', 'sums', 'chainermn']


class LinearLoss(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            for name in NAMES:
                setattr(self, name, chainer.Parameter(np.zeros(3)))

    def forward(self, gradients):
        return sum(F.sum(getattr(self, name) * gradient)
                   for name, gradient in zip(NAMES, gradients, strict=True)
                   if gradient is not None)


def resized():
    return st.builds(
        Resized, st.integers(0, 2**31), st.lists(st.tuples(
            st.integers(0, 11), st.integers(1, 4), st.booleans()), min_size=2, max_size=4
        ).map(tuple), st.sampled_from([name for name in OPTIMIZERS if name != 'Lamb']),
        st.booleans(), st.integers(1, 3), st.sampled_from(['plain', 'overlap', 'double buffering']))


def train_in_jobs(comm, program, folder):
    """Return the parameters after each job, on the ranks that it had."""
    end, found = 0, []
    options = {'zero_fill': True, 'overlap': 'always' if program.mode == 'overlap' else False,
               'double_buffering': program.mode == 'double buffering',
               'n_accumulations': 1 if program.mode == 'double buffering'
               else program.n_accumulations}
    for number, n_updates, is_sharded in program.jobs:
        begin, end, group = end, end + n_updates, some_of(comm, 1 + number % comm.size)
        if group is not None:
            actual, model = OPTIMIZERS[program.optimizer](), LinearLoss()
            if program.is_scaled:
                actual.loss_scaling(interval=1)  # another scale in each update
            optimizer = chainermn.create_multi_node_optimizer(
                actual, group, shard_states=is_sharded, **options).setup(model)
            saver = checkpointer_of(group, folder)
            target = {'model': model, 'optimizer': optimizer}
            assert saver.maybe_load(target) == (begin or None)
            for update in range(begin, end):
                optimizer.update(model, program.gradients(update, group.rank, group.size))
            saver.save(target, end)
            killed(saver)
            found.append((end, state(model)))
            group.finalize()
        comm.barrier()
    return found


@law(resized(), planted(resume, 'mean_of_sums', lambda mean: lambda of_ranks: mean(of_ranks[:1])))
@pytest.mark.mpi(min_size=2)
def test_another_number_of_ranks(comm, program, tmp_path):
    """Jobs that resume on other numbers of ranks, sharded or not: as one process."""
    found = dict(train_in_jobs(comm, program, folder_of(comm, tmp_path)))
    model, optimizer = LinearLoss(), OPTIMIZERS[program.optimizer]()
    optimizer.setup(model)
    n = 1 if program.mode == 'double buffering' else program.n_accumulations
    is_late = program.mode == 'double buffering'
    expected, waiting = {0: state(model)}, []
    for update in range(1, max(found, default=0)):  # the first one broadcasts
        waiting.append(program.gradients(update, 0, 1))
        if len(waiting) == n + is_late:
            for name, gradient in zip(NAMES, np.sum(waiting[:n], 0) / n, strict=True):
                getattr(model, name).grad = gradient
            optimizer.update()
            del waiting[:n]
        expected[update + 1] = state(model)
    expected[1] = expected[0]
    for end, parameters in found.items():
        for name, array in parameters.items():
            np.testing.assert_allclose(array, expected[end][name], 1e-9, 1e-9, err_msg=name)


# --- replica sets -----------------------------------------------------------------------------

def replica_trainer(comm, folder, sets, seed, stop, history, n_retains):
    draw = np.random.RandomState(seed)
    model = chainer.links.Classifier(chainer.links.Linear(
        2, 2, initialW=draw.normal(0, 1, (2, 2)).astype('f')))
    optimizer = optimizers.MomentumSGD(.1).setup(model)
    data = [(draw.normal(0, 1, 2).astype('f'), np.int32(i % 2)) for i in range(5)]
    iterator = iterators.SerialIterator(data, 2, shuffle=False)
    trainer = chainer.training.Trainer(
        chainer.training.StandardUpdater(iterator, optimizer), (stop, 'iteration'), out=folder)
    trainer.extend(multi_node_snapshot(comm, extensions.snapshot(
        autoload=True, n_retains=n_retains), sets), trigger=(2, 'iteration'))
    trainer.extend(lambda trainer: history.update({
        trainer.updater.iteration: (state(model), state(optimizer), iterator.current_position)}),
        name='journal', trigger=(1, 'iteration'))
    return trainer


def first_file(select):
    def changed(comm, names, writers):
        found = select(comm, names, writers)
        return found and found._replace(path=names.path(found.iteration, writers[0]))
    return changed


@law(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5),
               st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=3),
               st.sampled_from([-1, 1, 2])),
     planted(snapshot_module, 'select', first_file))
@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings('ignore:skipped the save')
def test_replica_sets(comm, program, tmp_path):
    """Snapshots of replica sets: each rank continues with its set's state, the newest of all."""
    labels, lost, n_retains = program
    label_of = [labels[rank % len(labels)] for rank in range(comm.size)]
    sets = [[rank for rank, label in enumerate(label_of) if label == each]
            for each in sorted({*label_of})]
    folder, history, again = folder_of(comm, tmp_path), {}, {}
    seed = label_of[comm.rank]
    replica_trainer(comm, folder, sets, seed, 7, history, n_retains).run()
    comm.barrier()
    gone = {(2 * number + 2, sets[n % len(sets)][0]) for number, n in lost}
    kept = {*[2, 4, 6][-n_retains:]} if n_retains > 0 else {2, 4, 6}
    for iteration, rank in gone if comm.rank == 0 else ():
        if iteration in kept:
            os.remove(f'{folder}/snapshot_iter_{iteration}.{rank}')
    comm.barrier()
    start = max({0, *kept} - {iteration for iteration, _ in gone})
    trainer = replica_trainer(comm, folder, sets, seed, 9, again, n_retains)
    trainer.run()
    comm.barrier()
    assert [*again] == [*range(start + 1, 10)]
    for iteration in {*again} & {*history}:
        assert_same([*again[iteration]], [*history[iteration]])


# --- damaged files ----------------------------------------------------------------------------

def flip(path, other, fraction, bit):
    with open(path, 'r+b') as file:
        content = file.read()
        at = int(fraction * len(content))
        file.seek(at)
        file.write(bytes([content[at] ^ 1 << bit]))


DAMAGES = {
    'flipped': flip,
    'truncated': lambda path, other, fraction, bit: os.truncate(
        path, int(fraction * os.path.getsize(path))),
    'missing': lambda path, other, fraction, bit: os.remove(path),
    'of another rank': lambda path, other, fraction, bit: shutil.copy(other, path)}
DAMAGES['of another save'] = DAMAGES['of another rank']  # of the same iteration


@law(st.tuples(st.booleans(), st.dictionaries(
    st.tuples(st.integers(1, 3), st.integers(0, 9)), st.tuples(
        st.sampled_from(['flipped', *DAMAGES]), st.floats(0, .999), st.integers(0, 7)),
    min_size=1, max_size=3)), planted(rank_file, '_has_right_digest', lambda f: lambda path: True),
    examples=12)
@pytest.mark.filterwarnings('ignore:skipped the save', 'ignore:.*nothing was loaded')
def test_damaged_files(comm, program, tmp_path):
    """Damaged files: the newest undamaged save is loaded, or none; also by fewer ranks."""
    is_resized, damages = program
    folder, model = folder_of(comm, tmp_path), chainer.links.Linear(30, 20)
    older = folder_of(comm, tmp_path)
    for each in older, folder:
        saver = checkpointer_of(comm, each)
        for iteration in (1, 2, 3):
            model.W.array[...] = iteration + (0 if is_resized else 10 * comm.rank)
            saver.save(model, iteration)
        killed(saver)
    comm.barrier()
    damaged = {}
    for (iteration, number), how in damages.items():
        damaged.setdefault((iteration, number % comm.size), how)
    kept = f'{folder}/copy'
    if comm.rank == 0:
        shutil.copytree(folder, kept)
        for (iteration, rank), (kind, fraction, bit) in damaged.items():
            DAMAGES[kind](f'{folder}/run.{rank}.{iteration}',
                          f'{older}/run.{rank}.{iteration}' if kind == 'of another save' else
                          f'{kept}/run.{(rank + 1) % comm.size}.{iteration}', fraction, bit)
        shutil.rmtree(kept)
    comm.barrier()
    kinds = {each: {damaged.get((each, rank), [''])[0] for rank in range(comm.size)}
             for each in (1, 2, 3)}
    bad = {each for each, found in kinds.items() if found not in ({''}, {'of another save'}) and (
        comm.size > 1 or found != {'of another rank'})}
    expected = max({1, 2, 3} - bad, default=None)
    group = some_of(comm, max(1, comm.size - 1)) if is_resized else comm
    model.W.array[...] = 99
    if group is not None:
        loader = checkpointer_of(group, folder)
        assert group.allgather_obj(loader.maybe_load(model)) == [expected] * group.size
        loader._saver.lock.release()
        assert (model.W.array == (99 if expected is None else expected + (
            0 if is_resized else 10 * comm.rank))).all()


# --- while the training continues -------------------------------------------------------------

class Continued(Training):
    """A training that is saved by a thread while it goes on, or a resumed one."""

    def save(self, saver, number):
        saver.save({'model': self.optimizer.target, 'optimizer': self.optimizer}, number,
                   wait=False)

    def load(self, saver):
        return saver.maybe_load({'model': self.optimizer.target, 'optimizer': self.optimizer})

    def steps(self, begin, end):
        history = []
        for step in range(begin, end):
            self.happen(step)
            self.update(step)
            history.append(state(self.optimizer.target))
        return history


@law(programs(events=['', 'exception'], blocks=[*BLOCKS], batches=[3, 2], is_fp32=False,
              optimizer=[name for name in OPTIMIZERS if name != 'SGD']),
     planted(late_copies, 'finish_copies', lambda finish: lambda: None))
def test_saves_in_the_background(comm, program, tmp_path):
    """Saving in a thread: the values of that time, although the training has changed them."""
    at, gate, finish = program.seed % STEPS, threading.Event(), late_copies.LateCopies.finish

    def finish_later(late):
        if threading.current_thread().name.startswith('writes '):
            gate.wait(60)
        finish(late)

    saver = checkpointer_of(comm, folder_of(comm, tmp_path))
    training = Continued(program, comm)
    training.steps(0, at)
    with unittest.mock.patch.object(late_copies.LateCopies, 'finish', finish_later):
        training.save(saver, at)
        expected = training.steps(at, STEPS)
        gate.set()
        killed(saver)
    training.wait()
    resumed = Continued(program, comm)
    assert resumed.load(saver) == at
    found = resumed.steps(at, STEPS)
    resumed.wait()
    saver._saver.lock.release()
    assert_same(found, expected)


# --- which files stay -------------------------------------------------------------------------

def one_save_late(find):
    def changed(self, save):
        obsolete = find(self, save)
        return obsolete[:-1] if len(obsolete) > 1 else obsolete
    return changed


@law(st.tuples(st.integers(1, 3), st.integers(1, 3), st.lists(st.tuples(
    st.integers(-1, 2), st.booleans(), st.booleans()), min_size=4, max_size=10)),
    planted(checkpoint_module.MultiNodeCheckpointer, '_find_obsolete', one_save_late), examples=10)
def test_cleanup(comm, program, tmp_path):
    """Checkpointer: the newest saves stay, as the intervals say, and each can be loaded."""
    cp_interval, gc_interval, saves = program
    folder, model = folder_of(comm, tmp_path), chainer.links.Linear(2, 2)

    def create():
        return checkpointer_of(comm, folder, cp_interval=cp_interval, gc_interval=gc_interval)

    saver, iteration, kept = create(), 0, {}
    for number, (increment, is_restarted, waits) in enumerate(saves):
        iteration = max(0, iteration + increment)
        if is_restarted:
            killed(saver)
            saver = create()
        model.W.array[...] = 100 * number + comm.rank
        saver.save(model, iteration, wait=waits)
        model.W.array[...] = -1
        kept[iteration] = number
        past = sorted(each for each in kept if each <= iteration)
        for each in past[:-cp_interval] if len(past) >= cp_interval + gc_interval else ():
            del kept[each]
    killed(saver)
    comm.barrier()
    names = sorted(name for name in os.listdir(folder) if not name.startswith('tmp-'))
    found = []
    for each in sorted(kept, reverse=True):
        saver = create()
        found.append((saver.maybe_load(model), (model.W.array - comm.rank).tolist()))
        saver._saver.lock.release()
        comm.barrier()
        os.remove(f'{folder}/run.{comm.rank}.{each}')
        comm.barrier()
    assert names == sorted(f'run.{rank}.{each}' for rank in range(comm.size) for each in kept)
    assert found == [(each, [[100 * kept[each]] * 2] * 2) for each in sorted(kept, reverse=True)]
