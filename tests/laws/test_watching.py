"""Laws of observers: they do not change a single bit of training."""

import itertools
import json
import pathlib
import shutil
import time

import chainer
import hypothesis
import numpy as np
import pytest
from equal_values import assert_same
from laws.blocks import BLOCKS
from laws.law import law, planted
from laws.one_process import TOLERANCES
from laws.programs import BATCH, STEPS, programs
from laws.training import Training, state
from shared_fixtures import create

from chainermn._consistency import debug_checks
from chainermn._records import differences, run_record
from chainermn._records.read import RecordedRun
from chainermn._timeline import activities, recorder
from chainermn.communicators.naive_communicator import NaiveCommunicator

pytestmark = [pytest.mark.filterwarnings('ignore:overflow', 'ignore:invalid value',
                                         'ignore:divide by zero', 'ignore:Non finite')]

#: Programs with all blocks, including blocks with states and random numbers.
PROGRAMS = programs(blocks=[*BLOCKS], batches=(3, 2), dtype=['f', 'd'], compression=['', '2bit'])


def drawing(function):
    """A fault: the function also draws a random number."""
    def changed(*args, **kwargs):
        np.random.random()
        return function(*args, **kwargs)
    return changed


def function_by_function():
    """Return a context without PyTorch's kernels, which round differently if they run together."""
    return chainer.using_config('use_torch', 'never')


def doubled_scalars(mean):
    def changed(self, model, *args, **kwargs):
        result = mean(self, model, *args, **kwargs)
        for param in model.params():
            if param.grad is not None and param.array.ndim == 0:
                param.grad = param.grad * 2
        return result
    return changed


@law(PROGRAMS, planted(recorder, 'describe', drawing), examples=4)
def test_timeline(comm, program, tmp_path, monkeypatch):
    """Recording a timeline changes nothing."""
    expected = Training(program, comm).run()
    path, begin = str(tmp_path / 'timeline.json'), time.perf_counter()
    monkeypatch.setenv(recorder.VARIABLE, path)
    recorded = create(program.communicator)
    try:
        assert recorder.get() is not None
        found = Training(program, recorded).run()
    finally:
        recorded.finalize()
        recorder.close()
        monkeypatch.delenv(recorder.VARIABLE)
    assert_same(found, expected)
    elapsed = 1e6 * (time.perf_counter() - begin)
    for event in json.loads(recorder.path_of(path, comm.rank).read_text()):
        assert event.get('ts', 0) + event.get('dur', 0) <= elapsed


@law(PROGRAMS, planted(activities.Activities, 'enter', drawing), examples=4)
def test_activities(comm, program):
    """``chainermn top`` and metrics, which measure activities, change nothing."""
    expected = Training(program, comm).run()
    activities.start()
    try:
        found = Training(program, comm).run()
    finally:
        activities.stop()
    assert_same(found, expected)


@law(PROGRAMS, planted(debug_checks, 'check_means', drawing), examples=4)
def test_debug_mode(comm, program):
    """Chainer's debug mode changes nothing if all values are finite."""
    hypothesis.assume(not program.infinite)
    with function_by_function():
        expected = Training(program, comm).run()
        hypothesis.assume(all(np.isfinite(array).all() for array in expected[-3].values()))
        with chainer.using_config('debug', True):
            found = Training(program, comm).run()
    assert_same(found, expected)


@law(programs(mode='plain', is_manual=True, scale=None, compression='', n_accumulations=1,
              dtype=['f', 'd'], events=('',) * STEPS, batches=(BATCH,)),
     planted(debug_checks, 'check_local_gradients', lambda check: lambda gradients: None),
     examples=3)
def test_debug_mode_errors(comm, program):
    """In debug mode, a gradient that is not finite is not sent: all ranks raise the same error."""
    training = Training(program, comm)
    for number in range(2):
        training.update(number)
    net, draw = training.optimizer.target, np.random.RandomState(program.seed)
    before = state(net)
    with chainer.using_config('debug', True):
        loss = net(*program.batch(2, comm.rank, comm.size))
        net.cleargrads()
        loss.backward()
        params = [param for _, param in sorted(net.namedparams()) if param.size]
        param, odd = params[draw.randint(len(params))], draw.randint(comm.size)
        path = next(path for path, each in sorted(net.namedparams()) if each is param)
        if comm.rank == odd:
            param.grad = np.full_like(param.array, draw.choice([np.nan, np.inf, -np.inf]))
        with pytest.raises(ValueError, match=f'the gradient of {path} is not finite') as raised:
            training.optimizer.update()
    messages = comm.allgather_obj(str(raised.value))
    assert messages == messages[:1] * comm.size
    assert_same(state(net), before)
    training.update(2)


@law(PROGRAMS, planted(run_record, 'random_states', drawing), examples=4)
def test_run_records(comm, program, tmp_path):
    """A record of a run changes nothing, and identical runs have identical records."""
    expected = Training(program, comm).run()
    folders = [pathlib.Path(comm.bcast_obj(str(tmp_path))) / name for name in 'ab']
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    comm.barrier()
    for folder in folders:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv('CHAINERMN_RECORD', str(folder))
            patch.setenv('CHAINERMN_RECORD_DETAILS', str(1 + program.seed % 3))
            patch.setattr(run_record, '_numbers', itertools.repeat(1))
            found = Training(program, comm).run()
        assert_same(found, expected)
    comm.barrier()
    a, b = map(RecordedRun, folders)
    assert all(map(len, a.ranks.values())) or 'resume' in program.events
    assert differences.between(a, b) == []


class Reader(chainer.FunctionHook):
    """A hook that reads all of its arguments."""

    def forward_postprocess(self, function, in_data):
        self.total = sum(float(np.sum(x)) for x in in_data if x is not None)

    def backward_postprocess(self, function, in_data, out_grad):
        self.total = sum(float(np.sum(x)) for x in (*in_data, *out_grad) if x is not None)


@law(PROGRAMS, planted(Reader, 'forward_postprocess', drawing), examples=4)
def test_function_hooks(comm, program):
    """Function hooks that only read change nothing."""
    with function_by_function():
        expected = Training(program, comm).run()
        with chainer.function_hooks.TimerHook(), Reader():
            found = Training(program, comm).run()
    assert_same(found, expected)


@law(programs(communicator='naive', compression='', mode='plain', shard=False),
     planted(NaiveCommunicator, 'multi_node_mean_grad', doubled_scalars), examples=4)
def test_third_party_communicator(comm, program):
    """A communicator with only ChainerMN 7's methods gives the same parameters as ``naive``."""
    expected = Training(program, comm).run()
    found = Training(program, create('version7')).run()
    tolerance = TOLERANCES[program.dtype]
    for one, other in zip(found[:-2], expected[:-2], strict=True):
        for key, value in other.items():
            np.testing.assert_allclose(one[key], value, tolerance, tolerance, err_msg=key)
