"""What ``chainermn compare`` calls a difference, and which one comes first."""

import contextlib
import functools
import random
import subprocess
import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizer_hooks

import chainermn
from chainermn._commands import compare
from chainermn._records import differences, run_record, settings
from chainermn._records.read import RecordedRun


@pytest.fixture
def folder(naive, tmp_path):
    return tmp_path.__class__(naive.bcast_obj(str(tmp_path)))


def train(comm, folder, *, configure=lambda optimizer: None, before=lambda number, model: None,
          dtype='f', details=100, count=9):
    """Train, and return the record."""
    np.random.seed(0)
    random.seed(0)
    with chainer.using_config('dtype', np.dtype(dtype)):
        model = chainer.Sequential(L.Linear(4, 10), F.tanh, L.Linear(10, 3))
        optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(.1), comm)
        optimizer.setup(model)
        configure(optimizer)
        recording = run_record.record(optimizer, str(folder), details)
        draw = np.random.RandomState(comm.rank)
        for number in range(count + 1):  # the first one copies
            before(number, model)
            x, t = draw.randn(6, 4).astype(dtype), draw.randint(0, 3, 6)
            optimizer.update(lambda x, t: F.softmax_cross_entropy(model(x), t), x, t)
    recording.close()
    comm.mpi_comm.Barrier()
    return RecordedRun(folder)


def test_a_small_hook_is_no_rounding(naive, folder):
    """Because its setting differs, the results also differ."""
    a = train(naive, folder / 'a')
    b = train(naive, folder / 'b',
              configure=lambda optimizer: optimizer.add_hook(optimizer_hooks.WeightDecay(1e-6)))
    found, = differences.between(a, b)
    assert (found.update, found.is_rounding) == (1, False)


@pytest.mark.parametrize('end', [100, 7])
def test_a_rate_that_changes(naive, folder, end):
    """The record has the hyperparameters of each update."""
    def change(rate, number, model):
        optimizers[-1].lr = rate if 4 <= number < end else .1

    optimizers = []
    a, b = (train(naive, folder / str(rate), configure=optimizers.append,
                  before=functools.partial(change, rate)) for rate in (.1, .2))
    found, = differences.between(a, b)
    assert (found.update, found.what, found.is_rounding) == (
        4, 'the parameters after the update', False)
    assert found.notes == ['the hyperparameter lr: 0.1 | 0.2']
    rates = [b.ranks['rank0'].hyperparameters(i)['lr'] for i in range(9)]
    assert rates == [.1] * 3 + [.2] * (min(end, 10) - 4) + [.1] * max(10 - end, 0)


@pytest.mark.mpi_skip
def test_a_rate_of_an_update_that_failed(tmp_path):
    """A failed update has no line, so the next line has the hyperparameters that it changed."""
    def fail(rule, param):
        raise ArithmeticError

    comm = chainermn.create_communicator('naive')
    model = chainer.Sequential(L.Linear(4, 3))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(.1), comm).setup(model)
    recording = run_record.record(optimizer, str(tmp_path), 100)
    for number in range(-1, 6):  # the first one copies
        if number == 3:
            optimizer.lr = .2
            model[0].W.update_rule.add_hook(fail, 'fail')
        with contextlib.suppress(ArithmeticError):
            optimizer.update(lambda: F.sum(model(np.ones((2, 4), 'f'))))
        if number == 3:
            model[0].W.update_rule.remove_hook('fail')
    recording.close()
    rank = RecordedRun(tmp_path).ranks['rank0']
    assert [rank.hyperparameters(i)['lr'] for i in range(len(rank))] == [.1] * 3 + [.2] * 2


def test_a_hint_despite_unused_random_numbers(naive, folder):
    """Unused generator states differ in most runs, because Python seeds its generator randomly."""
    def start(seed, number, model):
        if number == 0:
            random.seed(seed)
        if number == 4 and seed == 2:
            optimizers[-1].add_hook(shrink, timing='post')

    def shrink(optimizer):
        optimizer.target[0].W.array *= .9

    optimizers = []
    a, b = (train(naive, folder / str(seed), configure=optimizers.append,
                  before=functools.partial(start, seed)) for seed in (1, 2))
    found, = differences.between(a, b)
    assert (found.update, found.what) == (4, 'the parameters after the update')
    assert found.notes[0].startswith('The gradients are the same: the optimizer, a hyperparameter')
    assert 'record again with details of update 4' in found.notes[1]


@pytest.mark.parametrize('details', [1, 100])
def test_a_small_change_of_a_parameter_is_no_rounding(naive, folder, details):
    def change(number, model):
        if number == 5:
            model[0].b.array[0] += 1e-5 if details == 1 else 2e-3

    a = train(naive, folder / 'a', details=details)
    b = train(naive, folder / 'b', details=details, before=change)
    found, = differences.between(a, b)
    assert (found.update, found.is_rounding) == (5, False)
    if details == 1:
        assert found.what == 'the parameters before the update'


def test_frozen_parameters_are_a_setting(naive, folder):
    a = train(naive, folder / 'a')
    b = train(naive, folder / 'b', configure=lambda optimizer: (
        optimizer.target[0].b.update_rule.__setattr__('enabled', False)))
    assert settings.differing(a.ranks['rank0'], b.ranks['rank0']) == {
        'frozen parameters': ([], ['/0/b'])}
    found, = differences.between(a, b)
    assert (found.update, found.is_rounding) == (1, False)


def test_batches_of_other_dtypes_are_the_same(naive, folder):
    def change(number, model):
        if number == 7:
            model[2].b.array[0] += 1

    a, b = (train(naive, folder / dtype, dtype=dtype) for dtype in 'fd')
    found, = differences.between(a, b)
    assert (found.what, found.is_rounding) == ('the loss', True)
    changed = train(naive, folder / 'changed', dtype='d', before=change)
    _, found = differences.between(a, changed)
    assert (found.what, found.update) == ('the loss', 7)


def test_a_loss_scale_changes_gradients_only(naive, folder):
    a, b = (train(naive, folder / str(scale), configure=lambda optimizer, scale=scale: (
        optimizer.actual_optimizer.loss_scaling(scale=scale))) for scale in (2., 1024.))
    assert settings.differing(a.ranks['rank0'], b.ranks['rank0']) == {
        'loss scale': (2., 1024.)}
    assert differences.between(a, b) == []


def test_python_numbers_have_the_same_digest_in_all_processes():
    code = ('import random; from chainermn._records import run_record; random.seed(3); '
            'print(run_record.random_states()["python"])')
    assert len({subprocess.check_output([sys.executable, '-c', code]) for _ in range(3)}) == 1


def test_states_that_differ_before_they_are_used(naive, folder):
    def draw(seed):
        def before(number, model):
            if number == 0:
                random.seed(seed)
            if number == 5:
                model[0].b.array[0] += random.random()
        return before

    a, b, c = (train(naive, folder / str(index), before=draw(seed))
               for index, seed in enumerate((1, 2, 1)))
    assert differences.between(a, c) == []
    found, = differences.between(a, b)
    assert (found.what, found.update) == ('the random numbers of the module random', 4)
    assert 'The states of the generator already differ before this update' in found.notes[0]
    assert 'The next difference: the loss, update 5' in found.notes[1]


def adversaries(comm, folder, rate):
    """Train two models in turn, the second with another rate from the fifth update on."""
    np.random.seed(0)
    models = [chainer.Sequential(L.Linear(4, 4)) for _ in range(2)]
    optimizers = [chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(.1), comm).setup(
        model) for model in models]
    recordings = [run_record.record(optimizer, str(folder), name=name)
                  for optimizer, name in zip(optimizers, ('', 'optimizer2'), strict=True)]
    x = np.random.RandomState(comm.rank).randn(6, 4).astype('f')
    for number in range(9):
        if number == 5:
            optimizers[1].lr = rate
        # The first one sees the second, which is updated before.
        for i in 1, 0:
            optimizers[i].update(lambda x: F.mean(models[0](models[1](x)) ** 2), x)
    for recording in recordings:
        recording.close()
    comm.mpi_comm.Barrier()
    return RecordedRun(folder)


def test_the_first_of_two_optimizers(naive, folder):
    a, b = adversaries(naive, folder / 'a', .1), adversaries(naive, folder / 'b', .2)
    found, = differences.between(a, b)
    assert (found.what, found.update, found.rank) == (
        'the parameters after the update of optimizer2', 5, 'optimizer2.rank0')


@pytest.mark.parametrize('others', [True, False])
def test_a_run_that_ended_before_all_ranks_used_the_second_optimizer(naive, folder, others):
    adversaries(naive, folder, .1)
    naive.mpi_comm.Barrier()  # all ranks have read the files
    if naive.rank == 0:
        path = folder / 'optimizer2.rank0.txt'
        path.write_text(path.read_text().partition('\n')[0] + '\n')
        if not others:
            for path in folder.glob('optimizer2.rank[1-9].txt'):
                path.unlink()
    naive.mpi_comm.Barrier()
    run = RecordedRun(folder)
    assert [*run.ranks] == [f'rank{rank}' for rank in range(naive.size)]
    assert compare._updates(run) == 8


@pytest.mark.mpi_skip
def test_calls_go_on_after_a_resume(tmp_path):
    """The order of two optimizers is known, also in a new process."""
    model = L.Linear(2, 2)
    optimizer = chainer.optimizers.SGD().setup(model)
    run_record._CallCount.last = 0
    for numbers in (1, 2, 3), (3, 4):
        recording = run_record.record(optimizer, str(tmp_path), number=iter(numbers).__next__)
        for _ in numbers:
            optimizer.update(lambda x: F.sum(model(x)), np.ones((1, 2), 'f'))
        recording.close()
        del optimizer.update
        run_record._CallCount.last = 0
    record = RecordedRun(tmp_path).ranks['rank0']
    assert [record.call(index) for index in range(4)] == [1, 2, 4, 5]
    assert [record.position(call) for call in (1, 3, 4, 9)] == [0, 2, 2, 4]


@pytest.mark.mpi(min_size=2)
def test_files_of_an_earlier_run_and_missing_ones(naive, folder, capsys):
    train(naive, folder / 'a')
    alone = naive.split(naive.rank, 0)
    if naive.rank == 0:
        (folder / f'a/rank{naive.size - 1}.txt').rename(folder / 'moved.txt')
        run = RecordedRun(folder / 'a')
        assert run.missing == [f'rank{naive.size - 1}.txt']
        assert '; rank' in compare._lines(compare._result(run, None, []), [])[0]
        (folder / 'moved.txt').rename(folder / f'a/rank{naive.size - 1}.txt')
        run = train(alone, folder / 'a')  # by one rank
        assert [*run.ranks] == ['rank0'] and not run.missing
    naive.mpi_comm.Barrier()


@pytest.mark.mpi_skip
def test_what_cannot_be_compared(naive, tmp_path, usage_error):
    run = train(naive, tmp_path / 'a')
    path = tmp_path / 'a/rank0.txt'
    text = path.read_text()
    path.write_text(text.replace('"size": 1,', '"size": 2,'))
    assert ('contains the record of only one of 2 ranks. Record all ranks (add RunRecord or set '
            'CHAINERMN_RECORD on each') in usage_error('compare', run.folder)
    path.write_text(text.partition('\n')[0] + '\n')
    assert 'contains no updates: the run ended before its first' in usage_error(
        'compare', run.folder, run.folder)


@pytest.mark.mpi_skip
def test_wrong_details():
    with pytest.raises(ValueError, match=r'details must be a positive integer .*, not 0'):
        chainermn.extensions.RunRecord(details=0)
    with pytest.raises(TypeError, match=r"details must be a positive integer .*, not 'all'"):
        chainermn.extensions.RunRecord('record', 'all')


@pytest.mark.mpi_skip
def test_wrong_arguments_of_a_record_of_pytorch(tmp_path):
    torch = pytest.importorskip('torch')
    record_of = chainermn.extensions.TorchRecord
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=.1)
    with pytest.raises(TypeError, match=r'module must be a torch\.nn\.Module, not builtins\.str'):
        record_of(str(tmp_path), module, optimizer)
    with pytest.raises(TypeError, match=r'must be a torch\.optim\.Optimizer, not chainer'):
        record_of(module, chainer.optimizers.Adam(), str(tmp_path))
    record = record_of(module, optimizer, str(tmp_path))
    with pytest.raises(TypeError, match='loss must be a tensor with one element, not float'):
        record.loss(1.)
    with pytest.warns(RuntimeWarning, match='TorchRecord has recorded nothing'):
        optimizer.step()
    optimizer.step()  # warns once


@pytest.mark.mpi_skip
def test_both_ways_to_record(naive, tmp_path):
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(.1), naive)
    run_record.record_by_environment(optimizer, str(tmp_path), '')
    with pytest.warns(RuntimeWarning, match=r'being recorded to .*\. Use either CHAINERMN_R'):
        run_record.record(optimizer, str(tmp_path))
    with pytest.warns(RuntimeWarning, match='recorded to .*; from now on it is recorded to .*x'):
        run_record.record(optimizer, str(tmp_path / 'x'))
