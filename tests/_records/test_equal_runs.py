"""Equal runs have equal records, also after a resume and on other numbers of ranks."""

import copy
import json
import pathlib
import pickle

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn
from chainermn._records import differences, run_record
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
        assert found.what.startswith('a step: one run copies the parameters')
        assert found.update == 5
        assert found.notes[0].startswith('B does so after a resume')
    for record in b.ranks.values():
        numbers = [int(line.split()[0]) for line in record.lines]
        assert numbers == [*range(2, 13)]  # the first one copied
        assert sorted(record.details) == [1, 4, 7, 10]


def test_another_seed(naive, folder):
    trainer(naive, folder / 'a', 6)[0].run()
    trainer(naive, folder / 'b', 6, seed=1)[0].run()
    naive.mpi_comm.Barrier()
    found, = differences.between(*(RecordedRun(folder / name / 'record') for name in 'ab'))
    assert found.what == 'the initial parameters'


def loop(comm, folder, whole, change=lambda number, x: x):
    """Train with the same global batches on any number of ranks."""
    np.random.seed(0)
    model = chainer.Sequential(L.Linear(4, 10), F.tanh, L.Linear(10, 3))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(.1), comm)
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
    a, b, c = (RecordedRun(folder / name) for name in (
        'all', f'one{naive.rank}', f'other{naive.rank}'))
    assert (a.size, b.size) == (naive.size, 1)
    assert differences.between(a, b) == differences.between(b, a) == []
    found, = differences.between(a, c)
    assert (found.what, found.update) == ('the examples in the batches of all ranks', 5)


@pytest.mark.mpi(min_size=2)
def test_replicas_that_differ(naive, folder):
    np.random.seed(0)
    model = L.Linear(3, 2)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), naive).setup(model)
    recording = run_record.record(optimizer, str(folder), 1)
    for number in range(6):
        if number == 4 and naive.rank == naive.size - 1:
            model.b.array[1] += 1
        optimizer.update(lambda: F.sum(model(np.ones((1, 3), 'f'))))
    recording.close()
    naive.mpi_comm.Barrier()
    found, = differences.of_ranks(RecordedRun(folder))
    assert (found.update, found.rank) == (4, f'rank0 and rank{naive.size - 1}')
    assert found.notes[0].startswith('the parameter /b before the update')


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


@pytest.mark.mpi_skip
def test_what_is_no_record(tmp_path):
    with pytest.raises(ValueError, match=r'has no record of a run: no file rank0\.txt'):
        RecordedRun(tmp_path)
    (tmp_path / 'rank0.txt').write_text('1 2 3\n')
    with pytest.raises(ValueError, match='is not a record of a run, or of another version'):
        RecordedRun(tmp_path)


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
    assert settings['model']['/0/W'][:3] == [10, 4, 'float32']


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
