"""Laws of records of runs: what is read back, and where two runs begin to differ."""

import itertools
import pathlib
import shutil

import numpy as np
import pytest
from hypothesis import strategies as st
from laws.blocks import BLOCKS
from laws.law import law, planted
from laws.programs import STEPS, programs
from laws.training import Training

from chainermn._records import differences, run_record
from chainermn._records.read import RecordedRun

pytestmark = [pytest.mark.filterwarnings('ignore:overflow', 'ignore:invalid value',
                                         'ignore:divide by zero', 'ignore:Non finite')]


def folders(comm, tmp_path, *names):
    """Return empty folders, the same on all ranks."""
    found = [pathlib.Path(comm.bcast_obj(str(tmp_path))) / name for name in names]
    for folder in found if comm.rank == 0 else ():
        shutil.rmtree(folder, ignore_errors=True)
    comm.barrier()
    return found


def recorded(folder, details, train):
    """Train with a record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('CHAINERMN_RECORD', str(folder))
        patch.setenv('CHAINERMN_RECORD_DETAILS', str(details))
        patch.setattr(run_record, '_numbers', itertools.repeat(1))
        train()


def parameters(model):
    return {path: param.array.copy() for path, param in sorted(model.namedparams())
            if param.array is not None}


class Observed(Training):
    """A training that also keeps what each update uses and computes, by its number."""

    def __init__(self, *args):
        self.updates = []  # number, loss, hyperparameters if there was a step, parameters
        self.is_first = True  # since the start, or since a resume
        super().__init__(*args)

    def resume(self):
        super().resume()
        self.is_first = True

    def update_once(self, number):
        optimizer, losses = self.optimizer, []
        t, before, rates = optimizer.t, parameters(optimizer.target), dict(
            optimizer.hyperparam.get_dict())
        forward = optimizer.target.forward

        def noted(*args):
            loss = forward(*args)
            losses.append(str(loss.array[()]))
            return loss

        optimizer.target.forward = noted
        try:
            super().update_once(number)
        finally:
            del optimizer.target.forward
        if self.is_first:  # a record begins anew, or continues before this update
            self.updates = [each for each in self.updates if each[0] <= t] if t else []
            self.is_first = False
        is_manual = self.program.is_manual and self.program.mode == 'plain'
        self.updates.append((t + 1, '-' if is_manual else losses[0],
                             rates if optimizer.t > t else None, before,
                             parameters(optimizer.target)))


def first_values(function):
    """Return the function, which always returns its first result."""
    results = []

    def changed(*args):
        results.append(function(*args))
        return results[0]
    return changed


def assert_digests(found, arrays):
    """Compare digests, which contain norms, means and maxima, with arrays."""
    assert {*found} == {*arrays}
    for path, array in arrays.items():
        if array.size:
            x = array.astype('d')
            np.testing.assert_allclose(
                found[path][1:], [np.linalg.norm(x), x.mean(), np.abs(x).max()], 1e-6, 1e-12, path)


@law(programs(blocks=[*BLOCKS], batches=(3, 2), dtype=['f', 'd']),
     planted(run_record, '_hyperparameters', first_values), examples=8)
def test_read_record(comm, program, tmp_path):
    """A record has the loss, hyperparameters and parameters of each update, even after resumes."""
    every, training = 1 + program.seed % 3, None
    folder, = folders(comm, tmp_path, 'a')

    def train():
        nonlocal training
        training = Observed(program, comm)
        training.run()

    recorded(folder, every, train)
    comm.barrier()
    rank = RecordedRun(folder).ranks[f'rank{comm.rank}']
    updates = training.updates[len(training.updates) - len(rank):]
    # Only updates that copy the parameters of rank 0 are left out.
    assert not any(rates for *_, rates, _, _ in training.updates[:-len(rank) or None])
    assert [(row['update'], row['loss']) for row in map(rank.row, range(len(rank)))] == [
        (str(number), loss) for number, loss, *_ in updates]
    for index, (_, _, rates, _, _) in enumerate(updates):
        assert rates is None or rank.hyperparameters(index) == rates
    last = {number: (before, after) for number, _, _, before, after in training.updates
            if (number - 1) % every == 0}
    assert {*rank.detailed} == {*last}
    for number, (before, after) in last.items():
        assert_digests(rank.details(number)['before'], before)
        assert_digests(rank.details(number)['after'], after)


class Planted(Training):
    """A training in which something happens once, on one rank or on all of them."""

    def __init__(self, program, comm, event, number, odd):
        self.event, self.number = event, number
        self.is_odd = comm.rank == odd
        super().__init__(program, comm)

    def update_once(self, number):
        if number == self.number:
            getattr(self, self.event)()
        super().update_once(number)

    def rate(self):
        for name in {'lr', 'alpha'} & {*self.optimizer.hyperparam.get_dict()}:
            setattr(self.optimizer, name, 2 * getattr(self.optimizer, name))

    def parameter(self):
        if self.is_odd:
            self.optimizer.target.first.W.array[0, 0] += 1

    def drawn(self):
        if self.is_odd:
            np.random.random()

    def loss(self):
        net, is_odd = self.optimizer.target, self.is_odd
        forward = net.forward

        def doubled(*args):
            del net.forward
            return forward(*args) * (2 if is_odd else 1)

        net.forward = doubled

    def batch(self):
        if self.is_odd:
            self.program = ChangedBatch(self.program, self.number)


class ChangedBatch:
    """A program in which one value of a batch differs."""

    def __init__(self, program, number):
        self._program, self._number = program, number

    def __getattr__(self, name):
        return getattr(self._program, name)

    def batch(self, number, rank, size):
        x, t, unused = self._program.batch(number, rank, size)
        if number == self._number:
            x[-1, -1] += 1
        return x, t, unused


#: What the first difference is, as far as it does not depend on the program.
WHAT = {'rate': 'the parameters after the update', 'parameter': '', 'loss': '',
        'drawn': 'the random numbers of numpy.random', 'batch': 'the batch'}


def first_example(digests):
    return lambda values: digests([each[:1] if hasattr(each, 'ndim') else each for each in values])


@law(st.tuples(programs(
    mode=['plain', 'overlap'], dtype=['f', 'd'], width=[7, 20], blocks=('Dropout',),
    batches=(3, 2), scale=None,
    optimizer=['SGD', 'MomentumSGD', 'NesterovAG', 'RMSprop', 'Adam'], hooks=(), infinite=(),
    compression=['', 'fp16'], shard=False, tie='', n_accumulations=1, events=('',) * STEPS,
    unused=((False,) * 3,)), st.sampled_from([*WHAT]),
    st.integers(1, STEPS - 2),  # the next update shows whether this one draws random numbers
    st.integers(0, 9), st.sampled_from([1, 3, 100])),
    planted(run_record, '_digests_of_batch', first_example), examples=8)
def test_first_difference(comm, program, tmp_path):
    """If runs differ in one event, their records first differ in its update and on its rank."""
    program, event, number, odd, details = program
    a, b = folders(comm, tmp_path, 'a', 'b')
    recorded(a, details, lambda: Training(program, comm).run())
    recorded(b, details, lambda: Planted(program, comm, event, number, odd % comm.size).run())
    comm.barrier()
    found, *others = differences.between(RecordedRun(a), RecordedRun(b))
    assert (found.update, others) == (number, [])
    assert found.rank == ('rank0' if event == 'rate' else f'rank{odd % comm.size}')
    if event != 'batch' or not program.is_manual or program.mode != 'plain':
        assert WHAT[event] in found.what  # without a loss function, a record has no batches
