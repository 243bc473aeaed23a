"""Laws of checkpoints: training that is saved and resumed matches uninterrupted training."""

import dataclasses
import random
import threading
import unittest.mock

import chainer
import numpy as np
import pytest
from chainer import functions as F
from hypothesis import strategies as st
from killed_jobs import some_of
from laws.blocks import BLOCKS
from laws.law import law, planted
from laws.programs import OPTIMIZERS, STEPS, programs
from laws.saves import MARKS, assert_same, checkpointer_of, folder_of, killed
from laws.training import Training, state

import chainermn
from chainermn.extensions._checkpointing import late_copies, resume
from chainermn.extensions._checkpointing import state as saved_state

pytestmark = MARKS

#: Events between steps that a new process repeats or that a checkpoint contains.
EVENTS = ['', 'exception', 'hyperparameter', 'scale', 'enable', 'rule hook', 'hook', 'add']


class Saved(Training):
    """Saves a checkpoint before one of the steps, and resumes from it with new objects.

    Args:
        program: The program.
        comm: The communicator.
        folder: Folder of the checkpoint; ``None`` to train without an interruption.
    """

    def __init__(self, program, comm, folder=None):
        self.folder, self.at = folder, program.seed % (STEPS + 1) if folder else None
        super().__init__(program, comm)

    def update(self, number):
        np.random.normal(), random.gauss(0, 1)  # both generators store a second number
        super().update(number)

    def happen(self, step):
        if step == self.at:
            self.resume()
        super().happen(step)

    def wait(self):
        """Do nothing, because the checkpointer waits."""

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
        # After loading, each rank has the complete states. The next update shards them again.
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


# Exclude blocks with state in other attributes: as in Chainer, only persistent values are saved.
@law(programs(events=EVENTS, blocks=sorted(BLOCKS.keys() - {'Counter', 'Memory'}),
              batches=[3, 2], is_fp32=False),
     planted(saved_state, 'capture_random', without_stored_number))
def test_resumed_training(comm, program, tmp_path):
    """Training resumed by the checkpointer is bitwise identical to uninterrupted training."""
    expected = Saved(program, comm).run()
    assert_same(Saved(program, comm, folder_of(comm, tmp_path)).run(), expected)


@dataclasses.dataclass(frozen=True)
class Resized:
    """Training in several jobs. For most fields, see ``Program``.

    Attributes:
        jobs: For each job: an integer that determines its number of ranks, its number of updates,
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
        """Return gradients whose mean over all ranks does not depend on the number of ranks."""
        mean = np.random.RandomState([self.seed, update]).randint(-8, 9, (len(NAMES), 3)) / 4
        found = [*(mean + (2. * rank - (size - 1)) / 4)]
        if update % 2:  # only one rank uses this parameter
            found[0] = None if rank else mean[0] * size
        return found


#: Names of parameters that are also names of other saved values.
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
    """Return the parameters after each job in which this rank took part."""
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
                actual.loss_scaling(interval=1)  # a different scale in each update
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
    """Jobs that resume on a different number of ranks, sharded or not, match one process."""
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


class Continued(Training):
    """Training that a thread saves while it continues, or that was resumed."""

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
    """Saving in a thread writes the values at the time of the call, even if they change later."""
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
