"""One snapshot for each replica set; all resume at the newest common one."""
import os
import re
import warnings

import chainer
import numpy as np
import pytest
from chainer.training import extensions
from each_case import each_case
from mpi4py import MPI
from shared_fixtures import communicators, raises_on_all

import chainermn
from chainermn.communicators.compression import PowerSGD
from chainermn.extensions import multi_node_snapshot
from chainermn.extensions._checkpointing.snapshot_arguments import parse_replica_sets

comm = communicators('naive', pytest.param('version7', marks=pytest.mark.full))


def make_trainer(comm, folder, seed, stop=(6, 'iteration'), wrapped=lambda optimizer: optimizer):
    model = chainer.links.Classifier(chainer.links.Linear(
        2, 2, initialW=np.random.RandomState(seed).normal(0, 1, (2, 2)).astype(np.float32)))
    optimizer = wrapped(chainer.optimizers.MomentumSGD(0.1)).setup(model)
    data = [(np.full(2, i, np.float32), np.int32(i % 2)) for i in range(4)]
    iterator = chainer.iterators.SerialIterator(data, 2, shuffle=False)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    return chainer.training.Trainer(updater, stop, out=folder)


def weights(trainer):
    return trainer.updater.get_optimizer('main').target.predictor.W.array.copy()


def names(folder):
    """All but the locks."""
    return sorted(name for name in os.listdir(folder) if not name.endswith('.lock'))


def leaders(sets, size):
    return [min(ranks) for ranks in parse_replica_sets(sets, size)]


SETS = [[], 'each'] if MPI.COMM_WORLD.size > 1 else [[]]


@pytest.fixture(params=SETS, ids=str)
def sets(request, comm):
    return [[rank] for rank in range(comm.size)] if request.param == 'each' else request.param


@pytest.mark.compares_calls
@pytest.mark.parametrize('kind', [None, '2bit', 'powersgd'])
@pytest.mark.parametrize('is_shared', [False, True])
def test_residuals_of_compression_in_a_shared_file_are_a_warning(comm, folder, kind, is_shared):
    for stop in (2, 4):
        compressor = PowerSGD(1, min_compression_rate=1) if kind == 'powersgd' else kind
        trainer = make_trainer(
            comm, folder, 0, (stop, 'iteration'), lambda optimizer, compressor=compressor:
            chainermn.create_multi_node_optimizer(optimizer, comm, compression=compressor))
        trainer.extend(multi_node_snapshot(
            comm, extensions.snapshot(autoload=True),
            [range(comm.size)] if is_shared else [[rank] for rank in range(comm.size)]),
            trigger=(2, 'iteration'))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            trainer.run()
        found = [each for each in caught if 'residuals of compressed' in str(each.message)]
        is_warned = kind and is_shared and stop == 4 and comm.rank == 0 < comm.size - 1
        assert len(found) == int(bool(is_warned))
        assert {each.filename for each in found} <= {__file__}
        assert trainer.updater.get_optimizer('main').t == stop - 1


def run_with_snapshots(comm, folder, sets, seed, **kwargs):
    trainer = make_trainer(comm, folder, seed)
    snapshot = multi_node_snapshot(comm, extensions.snapshot(**kwargs), sets)
    trainer.extend(snapshot, trigger=(2, 'iteration'))
    trainer.run()
    comm.barrier()
    return trainer


class Bare:
    """All that version 7 needs of a snapshot, apart from methods that may be empty."""

    filename = 'snapshot_iter_{.updater.iteration}'

    def __call__(self, trainer):
        chainer.serializers.save_npz(
            os.path.join(trainer.out, self.filename.format(trainer)), trainer)


class Wrapper:
    """Forwards to Chainer's snapshot."""

    def __init__(self):
        self.__dict__['snapshot'] = extensions.snapshot()

    def __getattr__(self, name):
        return getattr(self.snapshot, name)

    def __setattr__(self, name, value):
        setattr(self.snapshot, name, value)

    def __call__(self, trainer):
        return self.snapshot(trainer)


class OwnExtension(Bare, chainer.training.Extension):
    pass


@pytest.mark.sample(3)
@pytest.mark.parametrize('kind', [Bare, OwnExtension, Wrapper])
def test_snapshots_of_another_class(comm, folder, sets, kind):
    groups = parse_replica_sets(sets, comm.size)
    seed = next(i for i, ranks in enumerate(groups) if comm.rank in ranks)
    trainer = make_trainer(comm, folder, seed)
    trainer.extend(multi_node_snapshot(comm, kind(), sets), trigger=(3, 'iteration'))
    trainer.run()
    comm.barrier()
    assert names(folder) == sorted(
        f'snapshot_iter_{i}.{rank}' for rank in leaders(sets, comm.size) for i in (3, 6))
    np.testing.assert_array_equal(weights(resume(comm, folder, sets)), weights(trainer))


def resume(comm, folder, sets, seed=1234):
    trainer = make_trainer(comm, folder, seed, stop=lambda trainer: True)
    snapshot = multi_node_snapshot(comm, extensions.snapshot(autoload=True), sets)
    trainer.extend(snapshot, trigger=(1000, 'iteration'))
    trainer.run()
    return trainer


def test_autoload_before_other_extensions_start(comm, folder):
    """They continue from the saved iteration, such as with its learning rate."""
    rates = []
    for stop in (2, 3):
        trainer = make_trainer(comm, folder, 0, (stop, 'iteration'))
        trainer.extend(multi_node_snapshot(comm, extensions.snapshot(autoload=True), []),
                       trigger=(2, 'iteration'))
        trainer.extend(extensions.ExponentialShift('lr', .5), trigger=(2, 'iteration'))
        trainer.run()
        rates.append(trainer.updater.get_optimizer('main').lr)
        comm.barrier()
    assert rates == [.05, .05] and trainer.updater.iteration == 3


def test_snapshot_on_error(comm, folder):
    def fail(trainer):
        raise RuntimeError('on purpose')

    trainer = make_trainer(comm, folder, 0)
    trainer.extend(multi_node_snapshot(
        comm, extensions.snapshot(snapshot_on_error=True), []), trigger=(1000, 'iteration'))
    trainer.extend(fail, trigger=(3, 'iteration'))
    with pytest.raises(RuntimeError, match='on purpose'):
        trainer.run()
    comm.barrier()
    assert os.listdir(folder) == ['snapshot_iter_3.0']


def extend(trainer, extension, at, priority=0):
    """Call a function once at an iteration."""
    trainer.extend(lambda t: extension() if t.updater.iteration == at else None,
                   trigger=(1, 'iteration'), priority=priority, name=f'at {at}')


@pytest.mark.compares_calls
@pytest.mark.parametrize('at', [2, 4])
def test_an_error_of_the_thread_is_raised_on_all_ranks(comm, folder, sets, at):
    """At the next snapshot, or at the end; older ones stay, and no incomplete file is left."""
    last = leaders(sets, comm.size)[-1]
    stop = at + 2 if at == 2 else at
    trainer = make_trainer(comm, folder, 0, stop=(stop, 'iteration'))
    trainer.extend(multi_node_snapshot(comm, extensions.snapshot(), sets),
                   trigger=(2, 'iteration'))

    def no_file_there():
        if comm.rank == last:
            os.mkdir(f'{folder}/tmp-snapshot_iter_{at}.{last}.part')

    extend(trainer, no_file_there, at)
    with raises_on_all(OSError, match='not saved') as caught:
        trainer.run(show_loop_exception_msg=False)
        comm.barrier()  # with one set, where the ranks that do not write learn of it
    path = f'{folder}/snapshot_iter_{at}.{last}'
    assert f'rank {last}: {path}: IsADirectoryError' in str(caught.value)
    assert str(caught.value).startswith('a snapshot')
    comm.barrier()
    assert not os.path.exists(path)
    assert sorted(name for name in os.listdir(folder) if name.endswith(f'.{last}')) == (
        ['snapshot_iter_2.' + str(last)] if at == 4 else [])


def test_a_training_that_fails_completes_the_file_and_warns_of_its_error(comm, folder):
    def fail():
        raise RuntimeError('on purpose')

    for at in (2, 4):
        trainer = make_trainer(comm, folder, 0)
        trainer.extend(multi_node_snapshot(comm, extensions.snapshot(), []),
                       trigger=(at, 'iteration'))
        extend(trainer, fail, at, priority=-1000)
        if at == 4 and comm.rank == 0:
            os.mkdir(f'{folder}/tmp-snapshot_iter_4.0.part')
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            with pytest.raises(RuntimeError, match='on purpose'):
                trainer.run(show_loop_exception_msg=False)
        warned = ''.join(str(warning.message) for warning in caught)
        assert ('snapshot_iter_4.0: IsADirectoryError' in warned) == (at == 4 and comm.rank == 0)
        comm.barrier()
    assert [name for name in os.listdir(folder) if name.endswith('.0')] == ['snapshot_iter_2.0']


class OwnWriter(extensions.snapshot_writers.SimpleWriter):
    pass


@pytest.mark.sample(3)
@pytest.mark.parametrize('name', [
    'latest', 's_{.updater.iteration:06}.npz', 's_{.updater.iteration:d}', '{{}}{.updater.epoch}',
    'part/{.updater.iteration}.npz', 'part/latest'])
def test_names_that_autoload_finds(comm, folder, name, sets):
    os.makedirs(os.path.join(folder, 'part'), exist_ok=True)
    for start, stop in (0, 4), (4, 6):
        trainer = make_trainer(comm, folder, stop, (stop, 'iteration'))
        snapshot = extensions.snapshot(filename=name, autoload=True, n_retains=1)
        trainer.extend(multi_node_snapshot(comm, snapshot, sets), trigger=(2, 'iteration'))
        iterations = []
        trainer.extend(lambda t, found=iterations: found.append(t.updater.iteration),
                       name='seen', trigger=(1, 'iteration'))
        trainer.run()
        comm.barrier()
        assert iterations == [*range(start + 1, stop + 1)]
    found = [*names(folder), *(f'part/{each}' for each in names(os.path.join(folder, 'part')))]
    assert sorted({*found} - {'part'}) == sorted(
        f'{name.format(trainer)}.{rank}' for rank in leaders(sets, comm.size))


@pytest.mark.parametrize('name', [
    '{.updater.epoch}_{.updater.iteration}', '{.updater.epoch_detail}', '{.updater.iteration:4}',
    '{.updater.iteration!r}', '{', '{.updater.iteration}/part'])
def test_names_that_autoload_would_not_find(comm, name):
    with pytest.raises(ValueError, match='the file name is ' + re.escape(repr(name))):
        multi_node_snapshot(comm, extensions.snapshot(filename=name, autoload=True), [])


def test_a_function_as_file_name(comm, folder):
    run_with_snapshots(comm, folder, [], 0, filename=lambda t: f'at {t.updater.iteration}')
    assert names(folder) == ['at 2.0', 'at 4.0', 'at 6.0']
    with pytest.raises(ValueError, match='autoload'):
        multi_node_snapshot(
            comm, extensions.snapshot(filename=lambda t: 'x', autoload=True), [])


def test_trigger_and_priority_are_those_of_the_snapshot(comm):
    snapshot = extensions.snapshot()
    ours = multi_node_snapshot(comm, snapshot, [])
    assert (ours.trigger, ours.priority) == (snapshot.trigger, snapshot.priority)


@pytest.mark.mpi_skip
@each_case('sets, parsed', [
    ([], [{0, 1, 2, 3}]),
    ([[0]], [{0}, {1, 2, 3}]),
    ([[0, 1]], [{0, 1}, {2, 3}]),
    ([range(2), [2], [3]], [{0, 1}, {2}, {3}]),
    ([0], [{0}, {1, 2, 3}]),
    ([0, 1], [{0}, {1}, {2, 3}]),
    (range(4), [{0}, {1}, {2}, {3}]),
    ({2}, [{2}, {0, 1, 3}]),
    (((0, 3), {1}), [{0, 3}, {1}, {2}]),
    ((i for i in [np.int64(3), 0]), [{3}, {0}, {1, 2}]),
    ([(i for i in range(3))], [{0, 1, 2}, {3}]),
    (np.array([[0, 1], [2, 3]]), [{0, 1}, {2, 3}]),
    ([[], [1]], [{1}, {0, 2, 3}]),
])
def test_the_remaining_ranks_form_a_set(sets, parsed):
    assert parse_replica_sets(sets, 4) == parsed


@pytest.mark.compares_calls
@pytest.mark.every_size
@pytest.mark.parametrize('sets, kind, text', [
    ([[0], [0]], AssertionError, 'only be in one replica set'),
    ([0, {0}], AssertionError, 'only be in one replica set'),
    ([[-1]], AssertionError, 'has rank -1'),
    ([MPI.COMM_WORLD.size], AssertionError, f'has rank {MPI.COMM_WORLD.size}, but there are only'),
    (1, TypeError, 'a list of ranks or iterables of ranks, such as'),
    ([0.5], TypeError, '[0.5]'),
    (['a'], TypeError, "['a']"),
    ([[[0]]], TypeError, '[[[0]]]'),
])
def test_bad_sets(comm, sets, kind, text):
    with raises_on_all(kind, text):
        multi_node_snapshot(comm, extensions.snapshot(), sets)
    with raises_on_all(kind, text):
        multi_node_snapshot(comm, extensions.snapshot(), sets if comm.rank == comm.size - 1 else [])
        comm.barrier()  # where the others learn of it


@pytest.mark.compares_calls
@pytest.mark.parametrize('order', [(1, 0, 2), (0, 2, 1)])
def test_arguments_in_another_order(comm, order):
    def create(order=order):
        arguments = comm, extensions.snapshot(), []
        return multi_node_snapshot(*(arguments[i] for i in order))

    names = 'NaiveCommunicator', '_Snapshot', 'list'
    with raises_on_all(TypeError, f'It got {", ".join(names[i] for i in order)}.',
                       'multi_node_snapshot(comm, extensions.snapshot())'):
        create()
    with raises_on_all(TypeError, 'It got'):
        create(order if comm.rank == comm.size - 1 else (0, 1, 2))
        comm.barrier()


@pytest.mark.every_size
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('autoload', [False, True])
def test_sets_that_differ_between_ranks(comm, folder, autoload):
    sets = [[0]] if comm.rank == 0 else [[0], [1]] if comm.size > 2 else []
    snapshot = multi_node_snapshot(comm, extensions.snapshot(autoload=autoload), sets)
    if comm.size == 2 and not autoload:
        pytest.skip('one replica set does not communicate; the next collective raises')
    trainer = make_trainer(comm, folder, 0)
    with raises_on_all(ValueError, 'the ranks have different replica_sets',
                       f'rank 0: [[0], {list(range(1, comm.size))}]'):
        snapshot.initialize(trainer)


def test_only_masters_call_the_snapshot_its_condition_and_its_writer(comm, folder, sets):
    calls = []

    def called(name, method):
        return lambda *args: calls.append(name) or method(*args)

    class Writer(OwnWriter):
        def __call__(self, *args):
            calls.append('write')
            super().__call__(*args)

        def finalize(self):
            calls.append('finalize')

    def condition():
        calls.append('ask')
        return calls.count('ask') == 2

    snapshot = extensions.snapshot(writer=Writer(), condition=condition, autoload=True)
    snapshot.initialize = called('begin', snapshot.initialize)
    snapshot.finalize = called('end', snapshot.finalize)
    trainer = make_trainer(comm, folder, 0)
    ours = multi_node_snapshot(comm, snapshot, sets)
    trainer.extend(ours, trigger=(2, 'iteration'))
    trainer.run()
    comm.barrier()
    assert ours.is_master == (comm.rank in leaders(sets, comm.size))
    assert ours.snapshot is snapshot and ours.master == min(ours.replica_set)
    assert ours.replica_set == (set(range(comm.size)) if sets == [] else {comm.rank})
    assert calls == (
        ['begin', 'ask', 'ask', 'write', 'ask', 'end'] if ours.is_master else []) + ['finalize']
    assert names(folder) == sorted(
        f'snapshot_iter_4.{rank}' for rank in leaders(sets, comm.size))
    calls.clear()


@pytest.mark.mpi(min_size=2)
def test_sets_with_a_writer_of_their_own_do_not_wait_for_each_other(comm, folder):
    """Each has its trigger, as with ChainerMN 7."""
    trainer = make_trainer(comm, folder, 0)
    snapshot = multi_node_snapshot(comm, extensions.snapshot(writer=OwnWriter()), range(comm.size))
    trainer.extend(snapshot, trigger=(2 if comm.rank == 0 else 3, 'iteration'))
    trainer.run()
    comm.barrier()
    assert names(folder) == sorted(
        ['snapshot_iter_2.0', 'snapshot_iter_4.0', 'snapshot_iter_6.0']
        + [f'snapshot_iter_{i}.{rank}' for rank in range(1, comm.size) for i in (3, 6)])


@pytest.mark.compares_calls
@pytest.mark.parametrize('value, kind, text', [
    (lambda: 1 / 0, ZeroDivisionError, 'division by zero'),
    (lambda: np.empty(1, dtype=object), TypeError, 'odd is an array of Python objects')])
def test_a_state_that_one_rank_cannot_save_fails_on_all(comm, folder, sets, value, kind, text):
    trainer = make_trainer(comm, folder, 0)
    if comm.rank == leaders(sets, comm.size)[-1]:
        iterator = trainer.updater.get_iterator('main')
        iterator.serialize = lambda serializer: serializer('odd', value())
    trainer.extend(multi_node_snapshot(comm, extensions.snapshot(), sets),
                   trigger=(2, 'iteration'))
    with raises_on_all(kind, match=text):
        trainer.run(show_loop_exception_msg=False)
        comm.barrier()  # with one set, where the ranks that do not write learn of it


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('what', ['trigger', 'condition'])
def test_snapshots_that_some_sets_do_not_take_are_an_error_on_all_ranks(comm, folder, what):
    last = comm.size - 1
    sets = [[rank] for rank in range(comm.size)]
    trainer = make_trainer(comm, folder, 0)
    if what == 'trigger':
        snapshot = extensions.snapshot()
        trigger = (3 if comm.rank == last else 2, 'iteration')
    else:
        snapshot = extensions.snapshot(condition=lambda: comm.rank != last, autoload=True)
        trigger = (2, 'iteration')
    trainer.extend(multi_node_snapshot(comm, snapshot, sets), trigger=trigger)
    match = (f'rank 0: iteration 2(.|\n)*rank {last}: iteration 3' if what == 'trigger'
             else f'is incomplete(.|\n)*rank {last}: wrote no file(.|\n)*Use a condition')
    with raises_on_all(ValueError, match=match):
        trainer.run(show_loop_exception_msg=False)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('n_retains', [-1, 1])
def test_a_condition_of_one_rank_without_autoload(comm, folder, n_retains):
    """As in ChainerMN 7, only that rank's files are written; the warning comes once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        run_with_snapshots(comm, folder, [[rank] for rank in range(comm.size)], 0,
                           condition=lambda: comm.rank == 0, n_retains=n_retains)
    assert names(folder) == [f'snapshot_iter_{i}.0' for i in ((2, 4, 6) if n_retains < 0 else [6])]
    texts = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert len(texts) == (comm.rank == 0)
    for text in texts:
        assert 'a snapshot of iteration 2 is incomplete\n  rank 0: wrote a file' in text
        assert 'rank 1: wrote no file' in text and 'autoload cannot resume' in text


@pytest.mark.sample(3)
@pytest.mark.parametrize('filename', ['snapshot_iter_{.updater.iteration}', 'latest',
                                      '{.updater.iteration}', lambda trainer: 'latest'])
def test_files_are_locked_while_training_and_free_afterwards(comm, folder, sets, filename):
    seen = []
    trainer = make_trainer(comm, folder, 0)
    trainer.extend(multi_node_snapshot(comm, extensions.snapshot(filename=filename, n_retains=1),
                                       sets), trigger=(2, 'iteration'))

    def look():
        comm.barrier()
        seen.extend(sorted(name for name in os.listdir(folder) if name.endswith('.lock')))

    extend(trainer, look, 5)
    trainer.run()
    comm.barrier()
    writers = [] if callable(filename) else leaders(sets, comm.size)
    assert len(seen) == len(writers)
    assert all(f'.{rank}.lock' in name for rank, name in zip(writers, seen, strict=True))
    assert not [name for name in os.listdir(folder) if name.endswith('.lock')]
    assert len(names(folder)) == len(leaders(sets, comm.size))


def test_a_program_that_changes_its_directory(comm, folder, monkeypatch):
    """A relative folder is resolved at the beginning."""
    sets = [[rank] for rank in range(comm.size)]
    monkeypatch.chdir(folder)
    trainer = make_trainer(comm, 'out', 0)
    trainer.extend(multi_node_snapshot(comm, extensions.snapshot(n_retains=1), sets),
                   trigger=(2, 'iteration'))
    if comm.rank == 0:
        os.mkdir('elsewhere')
    comm.barrier()
    extend(trainer, lambda: os.chdir(f'{folder}/elsewhere'), 3)
    trainer.run()
    comm.barrier()
    assert os.listdir(f'{folder}/elsewhere') == []
    assert names(f'{folder}/out') == sorted(
        f'snapshot_iter_6.{rank}' for rank in leaders(sets, comm.size))
    os.chdir(folder)
    assert resume(comm, 'out', sets).updater.iteration == 6
