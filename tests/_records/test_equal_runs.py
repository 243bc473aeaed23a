"""Identical runs have identical records, even after a resume or on different numbers of ranks."""

import contextlib
import copy
import importlib.util
import json
import multiprocessing
import os
import pathlib
import pickle
import subprocess
import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn
from chainermn._commands import compare
from chainermn._records import differences, run_record, settings
from chainermn._records.read import RecordedRun


@pytest.fixture
def folder(naive, tmp_path):
    return pathlib.Path(naive.bcast_obj(str(tmp_path)))


def trainer(comm, folder, stop, seed=0):
    """Return a trainer of a model with dropout, whose data is shuffled."""
    np.random.seed(seed)
    with chainer.using_config('dtype', np.dtype('f')):
        model = L.Classifier(chainer.Sequential(
            L.Linear(4, 10), F.tanh, F.dropout, L.Linear(10, 3)))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm).setup(model)
    draw = np.random.RandomState(comm.rank)
    data = chainer.datasets.TupleDataset(draw.randn(20, 4).astype('f'), draw.randint(0, 3, 20))
    iterator = chainer.iterators.SerialIterator(data, 5)
    trainer = chainer.training.Trainer(chainer.training.updaters.StandardUpdater(
        iterator, optimizer), (stop, 'iteration'), str(folder))
    trainer.extend(chainermn.extensions.RunRecord(details=3))
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm, path=str(folder / 'save'))
    trainer.extend(checkpointer, trigger=(4, 'iteration'))
    return trainer, checkpointer


def interrupt(trainer):
    raise InterruptedError


@pytest.mark.parametrize('steps', [True, False])
def test_a_resumed_run(naive, folder, steps):
    trainer(naive, folder / 'a', 12)[0].run()
    interrupted, checkpointer = trainer(naive, folder / 'b', 12)
    interrupted.extend(interrupt, trigger=(6, 'iteration'))
    with pytest.raises(InterruptedError):
        interrupted.run(show_loop_exception_msg=False)
    resumed, checkpointer = trainer(naive, folder / 'b', 12, seed=3)
    checkpointer.maybe_load(resumed, *(
        [resumed.updater.get_optimizer('main')] if steps else []))
    assert resumed.updater.iteration == 4
    resumed.run()
    naive.mpi_comm.Barrier()
    a, b = (RecordedRun(folder / name / 'record') for name in 'ab')
    assert differences.of_ranks(b) == []
    if steps:
        assert differences.between(a, b) == []
    else:  # as in ChainerMN 7
        found, = differences.between(a, b)
        assert found.what.startswith('one run takes a step, and the other copies')
        assert found.update == 5
        assert found.notes[0].startswith('B copies the parameters, as after a resume')
    for record in b.ranks.values():
        numbers = [int(line.split()[0]) for line in record.lines]
        assert numbers == [*range(2, 13)]  # the first one copied
        assert sorted(record.detailed) == [1, 4, 7, 10]


def test_another_seed(naive, folder):
    trainer(naive, folder / 'a', 6)[0].run()
    trainer(naive, folder / 'b', 6, seed=1)[0].run()
    naive.mpi_comm.Barrier()
    found, = differences.between(*(RecordedRun(folder / name / 'record') for name in 'ab'))
    assert found.what == 'the initial parameters'


def loop(comm, folder, whole, change=lambda number, x: x, rate=.1):
    """Train with the same global batches on any number of ranks."""
    np.random.seed(0)
    model = chainer.Sequential(L.Linear(4, 10), F.tanh, L.Linear(10, 3))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(rate), comm)
    optimizer.setup(model)
    recording = run_record.record(optimizer, str(folder), 4)
    draw, share = np.random.RandomState(0), len(range(whole)) // comm.size
    mine = slice(comm.rank * share, (comm.rank + 1) * share)
    for number in range(9):
        x, t = draw.randn(whole, 4).astype('f'), draw.randint(0, 3, whole)
        x = change(number, x)
        optimizer.update(lambda x, t: F.softmax_cross_entropy(model(x), t), x[mine], t[mine])
    recording.close()
    comm.mpi_comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_other_numbers_of_ranks(naive, folder):
    alone = naive.split(naive.rank, 0)
    loop(naive, folder / 'all', 6 * naive.size)
    loop(alone, folder / f'one{naive.rank}', 6 * naive.size)
    loop(alone, folder / f'other{naive.rank}', 6 * naive.size,
         lambda number, x: x + (number == 5))
    loop(alone, folder / f'rate{naive.rank}', 6 * naive.size, rate=.2)
    a, b, c, d = (RecordedRun(folder / name) for name in (
        'all', f'one{naive.rank}', f'other{naive.rank}', f'rate{naive.rank}'))
    assert (a.size, b.size) == (naive.size, 1)
    assert differences.between(a, b) == differences.between(b, a) == []
    found, = differences.between(a, c)
    assert (found.what, found.update) == ('the examples in the batches of all ranks', 5)
    found, = differences.between(a, d)
    assert (found.what, found.update) == ('the parameters after the update', 1)
    assert found.notes[0] == 'the hyperparameter lr: 0.1 | 0.2'
    assert found.notes[1].startswith('relative difference of the norm of parameters: ')
    assert len(found.notes) == 2

    (number, values), *_ = differences.growth(a, d, found.rank, found.update)
    assert number == 1
    assert values['mean loss'] < 1e-6 < values['norm of parameters']
    assert 'loss' not in values  # of different batches
    if importlib.util.find_spec('matplotlib'):
        from chainermn._records import plot
        above, below = plot.draw(a, d).axes
        assert above.get_ylabel() == 'mean loss of all ranks'
        assert below.lines[0].get_label() == 'mean loss'
        assert plot.draw(a, a).axes[0].get_ylabel() == 'loss of rank0'


@pytest.mark.parametrize('n_accumulations', [1, 3])
@pytest.mark.mpi(min_size=2)
def test_uneven_inputs(naive, folder, n_accumulations):
    """In a join, the record of an exhausted rank has the updates of the other ranks."""
    def run(name, extra, end=None):
        model = L.Linear(3, 2, initialW=.5)
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(.01), naive, n_accumulations=n_accumulations).setup(model)
        recording = run_record.record(optimizer, str(folder / name), 1)
        draw = np.random.RandomState(naive.rank)
        for _ in range(2):
            with chainermn.join(optimizer):
                for _ in range(4 + extra * naive.rank):
                    optimizer.update(lambda x: F.sum(model(x) ** 2), draw.randn(5, 3).astype('f'))
                if end == naive.rank:
                    recording.close()
        recording.close()
        naive.barrier()
        return RecordedRun(folder / name)

    a, b, c = run('a', 1), run('b', 2), run('c', 1, end=0)
    assert differences.of_ranks(a) == differences.of_ranks(b) == []
    assert len({len(record) for record in a.ranks.values()}) == 1
    last = len(a.ranks['rank0']) - 1
    assert a.ranks['rank0'].row(last)['batch'] == 'none'
    assert a.ranks[f'rank{naive.size - 1}'].row(last)['batch'] != '-'
    for runs in ((a, b), (b, a)):
        found, = differences.between(*runs)
        assert (found.what, found.rank) == ('the batch', 'rank0' if naive.size == 2 else 'rank1')
        # With 2 ranks, rank 0 of a begins the second join while rank 0 of b is still in the first.
        name = 'A' if runs[0] is (b if naive.size == 2 else a) else 'B'
        assert found.notes == [f'{name} has already exhausted the inputs of {found.rank}.']

    assert differences.of_ranks(c) == []  # as far as rank 0 has recorded
    lines = compare._lines(compare._result(c, None, []), [])
    assert lines[0].endswith(f' 3 to {last + 1} updates, depending on the rank')
    assert lines[-1] == ('All ranks have the same parameters after each update that all of them '
                         'recorded.')


def replicas(comm, folder, plant=lambda number, model, optimizer: None, *, same=False,
             averaged=True, details=1, activation=F.tanh):
    """Train on all ranks; something happens before each update; return how the ranks differ."""
    np.random.seed(0)
    model = chainer.Sequential(L.Linear(3, 4), activation, L.Linear(4, 2))
    optimizer = chainer.optimizers.SGD(.1)
    if averaged:
        optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, compare_settings=False)
    optimizer.setup(model)
    recording = run_record.record(optimizer, str(folder), details)
    draw = np.random.RandomState(0 if same else comm.rank)
    for number in range(7):
        if comm.rank == comm.size - 1:
            plant(number, model, optimizer)
        optimizer.update(lambda x: F.sum(model(x) ** 2), draw.randn(5, 3).astype('f'))
    recording.close()
    comm.mpi_comm.Barrier()
    return differences.of_ranks(RecordedRun(folder))


def change_bias(number, model, optimizer):
    if number == 4:
        model[2].b.array[1] += 1


@pytest.mark.mpi(min_size=2)
def test_replicas(naive, folder):
    """An update in which a replica changes has a place in the program, if there is one."""
    found, = replicas(naive, folder / 'before', change_bias)
    assert (found.update, found.rank) == (4, f'rank0 and rank{naive.size - 1}')
    assert found.what == 'the parameters before the update'
    assert found.notes[0].startswith('the parameter /1/b (of LinearFunction, '
                                     'called at test_equal_runs.py:')
    assert not any('the output of' in note for note in found.notes)  # the batches differ

    def double(number, model, optimizer):
        if number == 4:
            mean = optimizer._averaging.mean

            def changed(*args):
                result = mean(*args)
                model[0].W.grad *= 2
                return result
            optimizer._averaging.mean = changed

    found, = replicas(naive, folder / 'mean', double)
    assert (found.update, found.what) == (4, 'the mean gradients')
    assert found.notes[0].startswith('the mean gradient of /0/W (of LinearFunction')

    def rate(number, model, optimizer):
        if number == 4:
            optimizer.lr *= 2

    found, = replicas(naive, folder / 'after', rate)
    assert (found.update, found.what) == (4, 'the parameters after the update')
    assert found.notes[0] == 'the hyperparameter lr: 0.1 | 0.2'


@pytest.mark.mpi(min_size=2)
def test_replicas_without_details(naive, folder):
    found, = replicas(naive, folder / 'later', change_bias, details=5)
    assert found.notes[0].startswith('The mean gradients are the same')
    assert 'is 6. There, the first difference is the parameter /1/b (of Linear' in found.notes[1]
    assert ') before the update, relative' in found.notes[1]
    found, = replicas(naive, folder / 'none', change_bias, details=100)
    assert 'record again with details of update 4' in found.notes[1]
    assert (naive.size < 3) == (len(found.notes) < 3)


def test_functions_of_replicas(naive, folder):
    """The report gives a function if ranks have the same batch and gradients are not averaged."""
    odd = naive.size > 1 and naive.rank == naive.size - 1
    found = replicas(naive, folder / 'a', same=True, averaged=False,
                     activation=lambda x: F.tanh(x * (2 if odd else 1)))
    assert len(found) == (naive.size > 1)
    if found:
        assert found[0].update == 1
        assert found[0].notes[0].startswith('rank0 calls _ * 1 at test_equal_runs.py:')
    assert replicas(naive, folder / 'b') == replicas(naive, folder / 'c', same=True) == []


@pytest.mark.mpi(min_size=2)
def test_settings_of_ranks(naive, folder, monkeypatch):
    monkeypatch.setattr(run_record, '_commit', lambda folder: {'git commit': '1234'})
    monkeypatch.setenv('OMP_NUM_THREADS', str(1 + naive.rank))
    replicas(naive, folder)
    first, second, *_ = RecordedRun(folder).ranks.values()
    assert first.settings['git commit'] == '1234'
    assert settings.differing(first, second) == {'OMP_NUM_THREADS': ('1', '2')}


@pytest.mark.mpi(min_size=2)
def test_models_that_are_no_replicas(naive, folder):
    optimizer = chainer.optimizers.SGD().setup(L.Linear(3, 2 + naive.rank))
    recording = run_record.record(optimizer, str(folder))
    optimizer.update(lambda: F.sum(optimizer.target.W))
    recording.close()
    naive.mpi_comm.Barrier()
    found, = differences.of_ranks(RecordedRun(folder))
    assert found.what == 'the models'
    assert found.notes[0].startswith('2 of 2 parameters differ, such as /W: (2, 3) float32 | (3, 3')


def test_two_optimizers(naive, folder):
    """Each has its own replicas."""
    for name in 'ab':
        for kind, width in (('first', 2), ('second', 3)):
            np.random.seed(width)
            model = L.Linear(3, width)
            optimizer = chainermn.create_multi_node_optimizer(
                chainer.optimizers.SGD(.1 * width), naive).setup(model)
            recording = run_record.record(optimizer, str(folder / name), 2, kind)
            for _ in range(4):
                optimizer.update(lambda x, model=model: F.sum(model(x)), np.ones((1, 3), 'f'))
            recording.close()
    naive.mpi_comm.Barrier()
    a, b = (RecordedRun(folder / name) for name in 'ab')
    assert len(a.ranks) == 2 * naive.size
    assert differences.of_ranks(a) == differences.between(a, b) == []


@pytest.mark.mpi_skip
def test_updates_after_the_end_of_a_record_and_of_copies(tmp_path):
    model = L.Linear(3, 2)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), chainermn.create_communicator('naive')).setup(model)
    recording = run_record.record(optimizer, str(tmp_path), number=lambda: 1)

    def fail():
        raise InterruptedError

    optimizer.update(lambda: F.sum(model(np.ones((1, 3), 'f'))))
    assert pickle.loads(pickle.dumps(recording)) is copy.deepcopy(recording) is None
    with pytest.raises(InterruptedError):
        optimizer.update(fail)
    recording.close()
    before = (tmp_path / 'rank0.txt').read_text()
    optimizer.update(lambda: F.sum(model(np.ones((1, 3), 'f'))))
    assert optimizer.t == 1
    assert (tmp_path / 'rank0.txt').read_text() == before


@pytest.mark.mpi_skip
def test_a_killed_run(tmp_path):
    comm = chainermn.create_communicator('naive')
    loop(comm, tmp_path, 6)
    path = tmp_path / 'rank0.txt'
    path.write_bytes(path.read_bytes()[:-20])
    record = RecordedRun(tmp_path).ranks['rank0']
    assert len(record) == 7
    assert record.row(6)['update'] == '7'
    model = L.Linear(3, 2)
    optimizer = chainer.optimizers.SGD().setup(model)
    recording = run_record.record(optimizer, str(tmp_path), number=lambda: 7)
    optimizer.update(lambda: F.sum(model.W))
    recording.close()
    record = RecordedRun(tmp_path).ranks['rank0']
    assert [int(line.split()[0]) for line in record.lines] == [*range(1, 8)]


def one_update(optimizer):
    optimizer.update(lambda: F.sum(optimizer.target.W))


def test_a_record_that_cannot_be_written(naive, folder):
    """The rank warns; all ranks continue."""
    odd = naive.rank == naive.size - 1
    if naive.rank == 0:
        (folder / 'file').touch()
    naive.mpi_comm.Barrier()
    for where in ('file/record', 'file', 'full'):
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(), naive).setup(L.Linear(3, 2))
        recording = run_record.record(optimizer, str(folder / (where if odd else 'record')))
        if where == 'full':
            one_update(optimizer)
        with contextlib.ExitStack() as stack:
            if odd:
                reason = {'file/record': 'Not a directory', 'full': 'No space left',
                          'file': '/file: it is a file, but a record needs a folder'}[where]
                found = stack.enter_context(pytest.warns(
                    RuntimeWarning, match=f'stopped recording on this rank: .*{reason}'))
            if odd and where == 'full':
                os.dup2(os.open('/dev/full', os.O_WRONLY), recording._file)
            one_update(optimizer)
        if odd:
            assert [each.filename for each in found] == [__file__]
        for _ in range(3):
            one_update(optimizer)
        recording.close()
        assert optimizer.t == (3 if where != 'full' else 4)
    naive.mpi_comm.Barrier()
    assert len(RecordedRun(folder / 'full').ranks[f'rank{naive.size - 1}']) == 0


@pytest.mark.mpi_skip
def test_a_fork_writes_nothing(tmp_path):
    optimizer = chainer.optimizers.SGD().setup(L.Linear(3, 2))
    recording = run_record.record(optimizer, str(tmp_path))
    for number in range(2):  # before the first update, and after it
        process = multiprocessing.get_context('fork').Process(target=one_update, args=[optimizer])
        process.start()
        process.join()
        assert process.exitcode == 0
        assert bool(number) == (tmp_path / 'rank0.txt').exists()
        one_update(optimizer)
        assert len(RecordedRun(tmp_path).ranks['rank0']) == number + 1
    recording.close()


def test_a_wrong_number_of_details(naive, monkeypatch, folder):
    """All ranks raise an error, even if only one rank passes a wrong number."""
    monkeypatch.setenv('CHAINERMN_RECORD', str(folder))
    monkeypatch.setenv('CHAINERMN_RECORD_DETAILS', '0' if naive.rank == naive.size - 1 else '1')
    with pytest.raises(ValueError, match='CHAINERMN_RECORD_DETAILS must be a positive integer'):
        chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), naive)
        naive.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_a_folder(naive, monkeypatch, folder):
    """It is an error on all ranks: the record of the others would be incomplete."""
    odd = naive.size - 1
    monkeypatch.setenv('CHAINERMN_RECORD', '' if naive.rank == odd else str(folder))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), naive, compare_settings=False).setup(L.Linear(3, 2))
    with pytest.raises(chainermn.CollectiveMismatchError) as raised:
        one_update(optimizer)
    ranks = 'rank 0' if odd == 1 else f'ranks 0-{odd - 1}'
    assert f'  CHAINERMN_RECORD: set on {ranks}; not set on rank {odd}\n' in str(raised.value)


def test_a_folder_of_each_rank(naive, monkeypatch, folder):
    monkeypatch.setenv('CHAINERMN_RECORD', str(folder / str(naive.rank)))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), naive).setup(L.Linear(3, 2))
    one_update(optimizer)
    assert [*(folder / str(naive.rank)).iterdir()]


@pytest.mark.mpi_skip
def test_a_record_of_another_version(tmp_path, monkeypatch):
    """Columns that a version does not have are unknown."""
    comm = chainermn.create_communicator('naive')
    loop(comm, tmp_path / 'a', 6)
    columns = ('later', *(name for name in run_record.COLUMNS if name != 'python'))
    monkeypatch.setattr(run_record, 'COLUMNS', columns)
    states = run_record.random_states
    monkeypatch.setattr(run_record, 'random_states', lambda: {'numpy': states()['numpy']})
    loop(comm, tmp_path / 'b', 6)
    a, b = (RecordedRun(tmp_path / name) for name in 'ab')
    assert b.ranks['rank0'].row(0)['python'] == '-'
    assert differences.between(a, b) == []


@pytest.mark.mpi_skip
def test_two_jobs_do_not_share_a_record(tmp_path):
    """The second job trains without a record, and does not change the first one's."""
    other = ('import fcntl, sys; file = open(sys.argv[1], "a"); fcntl.lockf(file, fcntl.LOCK_EX); '
             'file.write("of the first job"); file.flush(); print(flush=True); input()')
    comm = chainermn.create_communicator('naive')
    path = tmp_path / 'rank0.txt'
    with subprocess.Popen([sys.executable, '-c', other, str(path)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as first:
        first.stdout.readline()
        with pytest.warns(RuntimeWarning, match=r'another job is writing rank0\.txt'):
            loop(comm, tmp_path, 6)
        assert path.read_text() == 'of the first job'
    loop(comm, tmp_path, 6)
    assert len(RecordedRun(tmp_path).ranks['rank0']) == 8


@pytest.mark.mpi_skip
def test_what_is_no_record(tmp_path):
    with pytest.raises(ValueError, match=r'has no record of a run: no file rank0\.txt'):
        RecordedRun(tmp_path)
    (tmp_path / 'rank0.txt').write_text('1 2 3\n')
    with pytest.raises(ValueError, match='is not a run record, or was written by a different'):
        RecordedRun(tmp_path)
    with pytest.raises(TypeError, match=r'folder must be a path, not Adam\. RunRecord gets'):
        chainermn.extensions.RunRecord(chainer.optimizers.Adam())


@pytest.mark.mpi_skip
def test_settings_have_no_secrets(tmp_path, monkeypatch):
    for name in ('AWS_SECRET_KEY', 'MY_TOKEN', 'CHAINERMN_RUN_LINK', 'WANDB_API_KEY'):
        monkeypatch.setenv(name, 'secret')
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    loop(chainermn.create_communicator('naive'), tmp_path, 6)
    text = (tmp_path / 'rank0.txt').read_text().split('\n')[0]
    assert 'secret' not in text
    settings = json.loads(text)
    assert settings['OMP_NUM_THREADS'] == '1'
    assert settings['version of numpy'] == np.__version__
    assert settings['hyperparameter lr'] == .1
    assert settings['model']['/0/W'][:2] == [[10, 4], 'float32']


@pytest.mark.mpi_skip
def test_a_training_in_pytorch(tmp_path):
    torch = pytest.importorskip('torch')
    import chainer_compat

    np.random.seed(0)
    model = chainer.Sequential(L.Linear(4, 10), F.tanh, L.Linear(10, 3))
    draw = np.random.RandomState(0)
    data = [(draw.randn(6, 4).astype('f'), draw.randint(0, 3, 6)) for _ in range(9)]
    module = chainer_compat.to_torch(model, data[0][0], train=True)
    optimizer = chainer.optimizers.SGD(.1).setup(model)
    run_record.record(optimizer, str(tmp_path / 'a'), 1)
    other = torch.optim.SGD(module.parameters(), .1)
    record = chainermn.extensions.TorchRecord(module, other, str(tmp_path / 'b'), 1)
    for number, (x, t) in enumerate(data):
        optimizer.update(lambda x, t: F.softmax_cross_entropy(model(x), t), x, t)
        record.begin(x, torch.tensor(t))
        other.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(torch.tensor(x)), torch.tensor(t))
        record.loss(loss * (2 if number == 6 else 1))
        loss.backward()
        other.step()
    found = differences.between(RecordedRun(tmp_path / 'a'), RecordedRun(tmp_path / 'b'))
    assert found[-1].update == 7
    assert found[-1].what == 'the loss'
    assert all(each.is_rounding for each in found[:-1])


@pytest.mark.mpi_skip
def test_a_module_with_other_names(tmp_path):
    """Its losses and norms are compared; a parameter with the same name is compared by name."""
    torch = pytest.importorskip('torch')
    np.random.seed(0)
    model = chainer.Sequential(L.Linear(4, 10), F.tanh, L.Linear(10, 3))
    start = [param.array.copy() for param in model.params()]
    draw = np.random.RandomState(0)
    data = [(draw.randn(6, 4).astype('f'), draw.randint(0, 3, 6)) for _ in range(9)]
    optimizer = chainer.optimizers.SGD(.1).setup(model)
    recording = run_record.record(optimizer, str(tmp_path / 'a'))
    for x, t in data:
        optimizer.update(lambda x, t: F.softmax_cross_entropy(model(x), t), x, t)
    recording.close()

    def train(name, rate=.1):
        layers = [torch.nn.Linear(4, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3)]
        module = torch.nn.Sequential(*layers)
        arrays = {param.shape: param for param in start}
        for param in module.parameters():
            param.data.copy_(torch.tensor(arrays[tuple(param.shape)]))
        if name == 'named':  # as in the Chainer model, but with another value
            layers[0].b = torch.nn.Parameter(layers[0].bias.detach() + .5)
        other = torch.optim.SGD(module.parameters(), .1)
        record = chainermn.extensions.TorchRecord(module, other, str(tmp_path / name))
        for number, (x, t) in enumerate(data):
            if number == 3:
                other.param_groups[0]['lr'] = rate
            record.begin(x, t)
            other.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(torch.tensor(x)), torch.tensor(t))
            record.loss(loss)
            loss.backward()
            other.step()
        record.close()
        return RecordedRun(tmp_path / name)

    a, same, rate = RecordedRun(tmp_path / 'a'), train('same'), train('rate', 10.)
    for one, two in ((a, same), (same, a)):
        assert all(each.is_rounding for each in differences.between(one, two))
    result = compare._result(a, same, [])
    assert result['settings']['names of parameters'] == (
        ['/0/W', '/0/b', '/1/W', '/1/b'], ['/0/bias', '/0/weight', '/2/bias', '/2/weight'])
    lines = compare._lines(result, [])
    assert any('compared by name, as chainer_compat.to_torch names' in line for line in lines)
    assert lines[-1].endswith('the same examples and, up to rounding, the same gradients and '
                              'parameters.')
    found = differences.between(a, rate)[-1]
    assert (found.what, found.update) == ('the parameters after the update', 4)
    assert found.notes == ['the hyperparameter lr: 0.1 | 10.0']
    found, = differences.between(a, train('named'))
    assert found.what == 'the initial parameters'
    assert found.notes[0].endswith('such as /0/b')
    assert compare._result(a, a, [])['settings'] == {}
