"""The checkpointer keeps and removes files, and a run resumes with the same bits."""
import contextlib
import os
import re
import resource
import warnings

import chainer
import numpy as np
import pytest
from killed_jobs import some_of
from shared_fixtures import communicators, raises_on_all

import chainermn
from chainermn._operations.ranks import ranks_text
from chainermn.communicators.compression import PowerSGD
from chainermn.extensions._checkpointing.command import verify_folder
from chainermn.extensions._checkpointing.state import copy_state
from chainermn.iterators import create_synchronized_iterator

comm = communicators('naive', pytest.param('version7', marks=pytest.mark.full))


def warns_rank_0(comm, match):
    """Rank 0 warns."""
    return (pytest.warns(RuntimeWarning, match=match) if comm.rank == 0
            else contextlib.nullcontext())


def checkpointer_of(comm, **kwargs):
    name = kwargs.pop('name', 'run')
    return chainermn.create_multi_node_checkpointer(name, comm, **kwargs)


def make_trainer(comm, folder, stop=(12, 'iteration'), synchronized=False):
    np.random.seed(comm.rank)
    data = np.random.RandomState(5).normal(0, 1, (20, 3)).astype(np.float32)
    labels = (data.sum(axis=1) > 0).astype(np.int32)
    dataset = chainermn.scatter_dataset(chainer.datasets.TupleDataset(data, labels), comm)
    iterator = chainer.iterators.SerialIterator(dataset, 3)
    if synchronized:
        iterator = create_synchronized_iterator(iterator, comm)
    model = chainer.links.Classifier(chainer.Sequential(
        chainer.links.Linear(None, 4), lambda x: chainer.functions.dropout(x, 0.3),
        chainer.links.Linear(4, 2)))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm).setup(model)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    return chainer.training.Trainer(updater, stop, out=folder), optimizer


def test_rank_0_logs_the_iteration(comm, folder, caplog):
    model = chainer.links.Linear(2, 2)
    checkpointer = checkpointer_of(comm, path=folder)
    with caplog.at_level('INFO', 'chainermn'):
        assert checkpointer.maybe_load(model) is None
        checkpointer.save(model, 5)
        assert checkpointer.maybe_load(model) == 5
    messages = [each.getMessage() for each in caplog.records if each.name == 'chainermn']
    assert messages == [
        f"No checkpoint of run 'run' in {folder}: starting from the beginning",
        f"Resumed from iteration 5 of run 'run' in {folder}"] * (comm.rank == 0)


def test_all_checkpoints_are_skipped(comm, folder, caplog):
    """The file of rank 0 is missing in one, and damaged in the other."""
    model = chainer.links.Linear(2, 2)
    checkpointer = checkpointer_of(comm, path=folder)
    for iteration in (5, 10):
        checkpointer.save(model, iteration)
    if comm.rank == 0:
        os.remove(f'{folder}/run.0.5')
        os.truncate(f'{folder}/run.0.10', 100)
    comm.barrier()
    n_skipped = 1 if comm.size == 1 else 2  # nothing is left of iteration 5 if there is one rank
    with caplog.at_level('INFO', 'chainermn'), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert checkpointer.maybe_load(model) is None
    assert [str(each.message).splitlines()[0] for each in caught] == (
        ['skipped iteration 10', 'skipped iteration 5'][:n_skipped] if comm.rank == 0 else [])
    assert {each.filename for each in caught} <= {__file__}
    count = '1 was' if n_skipped == 1 else '2 were'
    assert [each.getMessage() for each in caplog.records if each.name == 'chainermn'] == [
        f"No usable checkpoint of run 'run' in {folder} ({count} skipped): starting from the "
        'beginning'] * (comm.rank == 0)


def differing(comm, folder, save, load):
    """Save one object, load into another; return the error, which all ranks raise."""
    checkpointer_of(comm, path=folder).save(save, 4)
    with raises_on_all(ValueError) as caught:
        checkpointer_of(comm, path=folder).maybe_load(load)
    text = str(caught.value)
    assert text.startswith('iteration 4 was not loaded: the script does not match the checkpoint\n')
    assert text.endswith('Use the model, optimizer and dataset of the saved run. To start from '
                         'the beginning, pass a different name or folder.')
    return text


def test_another_shape_names_the_parameter_the_file_and_both_shapes(comm, folder):
    linear = chainer.links.Linear
    text = differing(comm, folder, {'model': linear(3, 1)}, {'model': linear(4, 1)})
    for rank in range(comm.size):
        assert (f'rank {rank}: model/W has shape (1, 3) in the file, but (1, 4) in the script '
                f'({folder}/run.{rank}.4)\n') in text
    # One that NumPy would broadcast; and a bare model.
    text = differing(comm, folder, linear(3, 1), linear(3, 2))
    assert ('rank 0: W has shape (1, 3) in the file, but (2, 3) in the script; '
            'b has shape (1,) in the file, but (2,) in the script') in text
    assert 'rank 0: b is missing from the file (' in differing(
        comm, folder, linear(3, 1, nobias=True), linear(3, 1))


@pytest.mark.compares_calls
def test_a_folder_that_is_not_writable_fails_at_creation(comm, folder):
    path = '/proc/no-files-here' if comm.rank == comm.size - 1 else folder
    with raises_on_all(OSError, match='Pass a different folder'):
        checkpointer_of(comm, path=path)
        comm.barrier()


def test_the_class_is_public(comm):
    checkpointer = checkpointer_of(comm)
    assert isinstance(checkpointer, chainermn.MultiNodeCheckpointer)
    assert checkpointer.default_name == '_MultiNodeCheckpointer'  # as in files of ChainerMN 7


def test_swapped_arguments(comm):
    with raises_on_all(TypeError, match='a name and a communicator, in this order'):
        chainermn.create_multi_node_checkpointer(comm, 'run')


def test_without_the_optimizer_the_next_update_only_broadcasts(comm, folder):
    trainer, _ = make_trainer(comm, folder, (2, 'iteration'))
    trainer.run()
    checkpointer = checkpointer_of(comm, path=folder)
    checkpointer.save(trainer, 2)
    for argument, steps in [((), 1), (('optimizer',), 2)]:
        trainer, optimizer = make_trainer(comm, folder)
        checkpointer.maybe_load(trainer, *(optimizer for _ in argument))
        trainer.updater.update()
        assert optimizer.t == steps


class TwoModels(chainer.training.updaters.StandardUpdater):
    """Updates a generator and a discriminator, like the updater of a GAN."""

    def update_core(self):
        for optimizer in self.get_all_optimizers().values():
            optimizer.update(chainer.functions.sum, optimizer.target.W)


def test_all_optimizers_of_a_trainer_step_after_loading(comm, folder):
    """Scripts pass one of them."""
    checkpointer = checkpointer_of(comm, path=folder)
    for n in (3, 5):
        optimizers = {name: chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(1), comm).setup(chainer.links.Linear(2, 1, True, initialW=0))
            for name in ('gen', 'dis')}
        iterator = chainer.iterators.SerialIterator(list(range(4)), 2)
        trainer = chainer.training.Trainer(
            TwoModels(iterator, optimizers), (n, 'iteration'), out=folder)
        checkpointer.maybe_load(trainer, optimizers['gen'])
        trainer.run()
        for optimizer in optimizers.values():  # the gradients are 1
            assert optimizer.t == n - 1
            np.testing.assert_array_equal(optimizer.target.W.array, np.full((1, 2), 1 - n))
        checkpointer.save(trainer, n)


def names(folder):
    """All but the locks."""
    return sorted(name for name in os.listdir(folder) if not name.endswith('.lock'))


def complete(folder, name='run'):
    """Iterations of the complete checkpoints."""
    return [row.iteration for row in verify_folder(str(folder))
            if row.name.startswith(f'{name}.0.') and not row.problems]


class Gated(chainer.Chain):
    """Is serialized with a gate before its parameters, so that none of them is written before."""

    def __init__(self, gate):
        super().__init__()
        with self.init_scope():
            self.linear = chainer.links.Linear(3, 2)
        self.gate = np.array(gate, dtype=object)
        self.register_persistent('gate')


def test_older_files_stay_until_the_newer_save_is_complete(comm, folder, gate):
    last = comm.size - 1
    checkpointer = checkpointer_of(comm, cp_interval=1, gc_interval=1, path=folder,
                                   allow_pickle=True)
    checkpointer.save(Gated(None), 1)
    checkpointer.save(Gated(gate if comm.rank == last else None), 2, wait=False)
    if comm.rank != last:
        checkpointer._saver.background.wait()
    comm.barrier()
    assert {f'run.{rank}.1' for rank in range(comm.size)} <= set(names(folder))
    comm.barrier()
    gate.is_open.set()
    checkpointer.save(Gated(None), 3)
    comm.barrier()
    assert names(folder) == [f'run.{rank}.3' for rank in range(comm.size)]


@contextlib.contextmanager
def full_disk(is_full):
    """No file can be longer than 1 MB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def large_model():
    return chainer.links.Linear(1000, 500)  # 2 MB


@pytest.fixture
def failed(comm, folder):
    """A checkpointer that has iteration 1, and could not write iteration 2 on the last rank."""
    checkpointer = checkpointer_of(comm, path=folder)
    checkpointer.save(large_model(), 1)
    with full_disk(comm.rank == comm.size - 1):
        checkpointer.save(large_model(), 2, wait=False)
        checkpointer._saver.background.wait()
    return checkpointer


@pytest.mark.parametrize('operation', ['save', 'finalize'])
def test_an_error_of_the_thread_is_raised_by_the_next_call(comm, folder, failed, operation):
    model, last = large_model(), comm.size - 1
    with raises_on_all(OSError, f'rank {last}: {folder}/run.{last}.2: ', match='File too large'):
        getattr(failed, operation)(*(model, 3) if operation == 'save' else ())
    left = {name for name in os.listdir(folder) if f'run.{last}.' in name}
    assert left - {f'tmp-run.{last}.N.lock'} == {f'run.{last}.1'}
    failed.save(model, 4)
    loaded = large_model()
    failed.maybe_load(loaded)
    np.testing.assert_array_equal(loaded.W.array, model.W.array)
    failed.finalize()


def test_an_error_of_the_thread_is_a_warning_if_training_failed(comm, failed):
    failed.on_error(None, RuntimeError(), None)
    if comm.rank == comm.size - 1:
        with pytest.warns(RuntimeWarning, match='File too large'):
            failed.finalize()
    else:
        failed.finalize()


def test_a_training_that_fails_completes_the_file(comm, folder, gate):
    trainer, _ = make_trainer(comm, folder, (4, 'iteration'))
    model = Gated(gate)
    trainer.extend(checkpointer_of(comm, allow_pickle=True), trigger=(2, 'iteration'))

    class Fails(chainer.training.Extension):
        def __call__(self, trainer):
            raise RuntimeError('on purpose')

        def on_error(self, trainer, exc, tb):
            gate.is_open.set()

        def serialize(self, serializer):
            model.serialize(serializer)

    trainer.extend(Fails(), trigger=(3, 'iteration'))
    with pytest.raises(RuntimeError, match='on purpose'):
        trainer.run()
    comm.barrier()
    assert names(folder) == sorted(f'run.{rank}.2' for rank in range(comm.size))
    checkpointer_of(comm, path=folder, allow_pickle=True).maybe_load(trainer)
    assert trainer.updater.iteration == 2


def test_stats_count_what_is_on_the_disk(comm, folder, gate):
    checkpointer = checkpointer_of(comm, path=folder, allow_pickle=True)
    checkpointer.save(Gated(gate), 1, wait=False)
    assert checkpointer.get_stats() == 'no checkpoints were saved'
    gate.is_open.set()
    checkpointer.maybe_load(Gated(None))
    assert len(checkpointer.stats.durations) == 1
    assert re.search(r'avg=0\.\d+, min=0\.\d+, max=0\.\d+', checkpointer.get_stats())


@pytest.mark.parametrize('arguments', [('a/b', 5, 5), ('run', 0, 5), ('run', 5, 0)])
def test_bad_arguments(comm, arguments):
    name, cp_interval, gc_interval = arguments
    with pytest.raises(ValueError, match=r'contain a slash|must be at least 1'):
        chainermn.create_multi_node_checkpointer(name, comm, cp_interval, gc_interval)


def test_a_list_is_refused(comm, folder):
    saver = chainermn.create_multi_node_checkpointer('x', comm, path=folder)
    with raises_on_all(TypeError, "target must be a dict of objects, such as {'model': model"):
        saver.save([chainer.links.Linear(2, 2)], 1)


@pytest.mark.compares_calls
@pytest.mark.mpi(min_size=2)
def test_maybe_load_on_one_rank(comm, folder):
    """The other ranks begin to train; both calls exchange objects."""
    saver = chainermn.create_multi_node_checkpointer('x', comm, path=folder)
    optimizer = chainer.optimizers.SGD().setup(chainer.links.Linear(2, 2))
    trainer = chainer.training.Trainer(chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator([1], 1), optimizer), out=folder)
    with raises_on_all(chainermn.CollectiveMismatchError, 'maybe_load of the checkpointer',
                       'callers differ'):
        saver.maybe_load(trainer) if comm.rank == 0 else saver.initialize(trainer)


def test_no_folder(comm):
    with pytest.raises(TypeError, match='path='):
        checkpointer_of(comm).save(chainer.links.Linear(2, 2), 1)
    checkpointer_of(comm).finalize()  # nothing was saved


# --- another number of ranks ------------------------------------------------------------------

def resized(comm, match='saved by . ranks and is loaded on'):
    return warns_rank_0(comm, match)


def save_on(comm, folder, model, iteration=1):
    checkpointer_of(comm, path=folder).save(model, iteration)
    comm.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('way', ['more', 'fewer'])
def test_models_that_differ_are_refused_on_all_ranks(comm, folder, way):
    few = some_of(comm, comm.size - 1)
    before, after = (few, comm) if way == 'more' else (comm, few)
    if before is not None:
        model = chainer.links.Linear(2, 2)
        model.W.array[...] = before.rank
        save_on(before, folder, model)
    comm.barrier()
    model = chainer.links.Linear(2, 2)
    untouched = model.W.array.copy()
    if after is not None:
        checkpointer = checkpointer_of(after, path=folder)
        if before.size == 1 if before is not None else comm.size == 2:
            with resized(after):  # one rank is a replica of itself
                checkpointer.maybe_load(model)
        else:
            with pytest.raises(ValueError, match='the saved states differ between ranks') as caught:
                checkpointer.maybe_load(model)
            assert f'rank {comm.size - 2} has its own state' in str(caught.value)
            assert len(set(after.allgather_obj(str(caught.value)))) == 1
            np.testing.assert_array_equal(model.W.array, untouched)
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_means_of_batch_normalization_may_differ(comm, folder):
    model = chainer.Sequential(chainer.links.Linear(
        2, 2, initialW=np.eye(2), initial_bias=np.zeros(2)), chainer.links.BatchNormalization(2))
    model[1].avg_mean[...] = comm.rank
    save_on(comm, folder, model)
    few = some_of(comm, 1)
    if few is not None:
        with resized(few, 'means of batch normalization, differed'):
            checkpointer_of(few, path=folder).maybe_load(model)
        assert (model[1].avg_mean == 0).all()  # of rank 0
    comm.barrier()


# --- errors of one rank -----------------------------------------------------------------------

class Fails(chainer.Chain):
    def __init__(self, fails):
        super().__init__()
        with self.init_scope():
            self.linear = chainer.links.Linear(2, 2)
        self.fails = fails

    def serialize(self, serializer):
        super().serialize(serializer)
        if self.fails:
            raise ZeroDivisionError('on purpose')


@pytest.mark.parametrize('wait', [True, False])
def test_a_state_that_fails_on_one_rank_fails_on_all(comm, folder, wait):
    model = Fails(False)
    checkpointer = checkpointer_of(comm, path=folder)
    checkpointer.save(model, 1, wait=wait)
    with raises_on_all(ZeroDivisionError, match='on purpose'):
        checkpointer.save(Fails(comm.rank == comm.size - 1), 2, wait=wait)
    checkpointer.save(model, 3)
    assert complete(folder) == [1, 3] and names(folder) == sorted(
        f'run.{rank}.{i}' for rank in range(comm.size) for i in (1, 3))
    with raises_on_all(ZeroDivisionError, match='on purpose'):
        checkpointer.maybe_load(Fails(comm.rank == comm.size - 1))


@pytest.mark.mpi(min_size=2)
def test_different_iterations_are_refused_on_all_ranks(comm, folder):
    checkpointer = checkpointer_of(comm, path=folder)
    with raises_on_all(ValueError, match=f'rank {comm.size - 1}: iteration 8'):
        checkpointer.save(chainer.links.Linear(2, 2), 8 if comm.rank == comm.size - 1 else 7)
    assert names(folder) == []


def test_python_objects_are_refused_on_all_ranks(comm, folder):
    class Odd(chainer.Link):
        def __init__(self, value):
            super().__init__()
            self.value = value
            self.register_persistent('value')

    objects = np.empty(1, dtype=object)
    model = Odd(objects if comm.rank == comm.size - 1 else np.zeros(1))
    with raises_on_all(TypeError, match='value is an array of Python objects'):
        checkpointer_of(comm, path=folder).save(model, 1)
    checkpointer = checkpointer_of(comm, path=folder, allow_pickle=True)
    checkpointer.save(model, 1)
    checkpointer.maybe_load(model)
    with pytest.raises(ValueError, match='allow_pickle=True'):
        checkpointer_of(comm, path=folder).maybe_load(model)


@pytest.mark.parametrize('operation', ['maybe_load', 'run'])
def test_a_folder_with_the_name_of_a_file(comm, folder, operation):
    """Found before time is spent on training."""
    trainer, _ = make_trainer(comm, folder, (2, 'iteration'))
    checkpointer, model = checkpointer_of(comm, path=folder), chainer.links.Linear(2, 2)
    trainer.extend(checkpointer, trigger=(1, 'iteration'))
    call = {'maybe_load': lambda: checkpointer.maybe_load(model), 'run': trainer.run}[operation]
    if comm.rank == comm.size - 1:
        os.mkdir(f'{folder}/run.{comm.rank}.9')
    comm.barrier()
    with raises_on_all(OSError, match=rf'run\.{comm.size - 1}\.9 is a folder'):
        call()
    assert trainer.updater.iteration == 0
    if comm.rank == comm.size - 1:
        os.rmdir(f'{folder}/run.{comm.rank}.9')
    comm.barrier()
    checkpointer.save(model, 5)


# --- one job at a time ------------------------------------------------------------------------


def test_two_checkpointers_of_one_trainer_get_different_names(comm, folder):
    """The trainer gives the second one another name, and thus other files."""
    trainer, _ = make_trainer(comm, folder, (2, 'iteration'))
    checkpointers = [checkpointer_of(comm) for _ in range(2)]
    for checkpointer in checkpointers:
        checkpointer.maybe_load(trainer)  # the name is still the same
        trainer.extend(checkpointer, trigger=(1, 'iteration'))
        checkpointer.finalize = lambda: None
    trainer.run()
    for checkpointer in checkpointers:
        checkpointer._saver.flush()
    comm.barrier()
    assert complete(folder) == complete(folder, 'run_1') == [1, 2]


def test_two_checkpointers_that_replace_each_others_files_are_refused(comm, folder):
    models = [chainer.links.Linear(2, 2), chainer.links.Linear(3, 3)]
    checkpointers = [checkpointer_of(comm, path=folder) for _ in models]
    for model, checkpointer in zip(models, checkpointers, strict=True):
        checkpointer.save(model, 1)
    last = comm.rank == comm.size - 1
    with raises_on_all(ValueError, match=r'two checkpointers named .run. save different'):
        checkpointers[0].save(models[0] if last else models[1], 2)
    checkpointers[1].save(models[1], 2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('operation', ['save', 'run'])
def test_names_that_differ_are_refused_on_all_ranks(comm, folder, operation):
    checkpointer = checkpointer_of(comm, name='a' if comm.rank else 'b')
    trainer, _ = make_trainer(comm, folder, (1, 'iteration'))
    trainer.extend(checkpointer)
    with raises_on_all(ValueError, match='different names') as caught:
        checkpointer.save(trainer, 1) if operation == 'save' else trainer.run()
    assert "rank 0: 'b'" in str(caught.value)
    assert f"{ranks_text(range(1, comm.size))}: 'a'" in str(caught.value)
    assert names(folder) == []


def test_a_failed_job_releases_its_lock(comm, folder):
    """Although its process continues, as in a notebook."""
    def fail(trainer):
        assert os.path.exists(f'{folder}/tmp-run.{comm.rank}.N.lock')
        raise RuntimeError('on purpose')

    trainer, _ = make_trainer(comm, folder)
    trainer.extend(checkpointer_of(comm), trigger=(1, 'iteration'))
    trainer.extend(fail, trigger=(2, 'iteration'), name='fail')
    with pytest.raises(RuntimeError, match='on purpose'):
        trainer.run(show_loop_exception_msg=False)
    assert not os.path.exists(f'{folder}/tmp-run.{comm.rank}.N.lock')


# --- another working folder -------------------------------------------------------------------

@pytest.mark.sample(1)
@pytest.mark.parametrize('given', ['path', 'out', 'later'])
def test_the_program_may_change_its_directory(comm, folder, monkeypatch, given):
    """Relative folders are resolved at the beginning."""
    monkeypatch.chdir(folder)
    trainer, optimizer = make_trainer(comm, 'out', (4, 'iteration'))
    checkpointer = checkpointer_of(comm, cp_interval=1, gc_interval=1,
                                   **({'path': 'out'} if given == 'path' else {}))
    if given == 'later':
        checkpointer.maybe_load(trainer, optimizer, path='out')
    checkpointer.finalize = lambda: None
    trainer.extend(checkpointer, trigger=(1, 'iteration'))
    comm.barrier()
    if comm.rank == 0:
        os.makedirs('elsewhere')
    comm.barrier()
    trainer.extend(lambda trainer: os.chdir(f'{folder}/elsewhere'), trigger=(2, 'iteration'),
                   name='chdir')
    trainer.run()
    checkpointer._saver.flush()
    comm.barrier()
    assert names(f'{folder}/out') == sorted(f'run.{rank}.4' for rank in range(comm.size))
    assert not os.path.exists(f'{folder}/elsewhere/out')
    again, optimizer = make_trainer(comm, 'out')
    checkpointer.maybe_load(again, optimizer)
    assert again.updater.iteration == 4


@pytest.mark.mpi(min_size=2)
@pytest.mark.compares_calls
@pytest.mark.filterwarnings('ignore:iteration .* was saved by')
@pytest.mark.parametrize('kind', ['2bit', 'powersgd'])
def test_residuals_on_a_different_number_of_ranks(comm, folder, kind):
    """Without a Trainer, too, only rank 0 continues with its residuals."""
    def start(comm):
        model = chainer.links.Linear(3, 2, initialW=1)
        return {'model': model, 'optimizer': chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(), comm,
            compression=PowerSGD(1, min_compression_rate=1) if kind == 'powersgd' else kind,
        ).setup(model)}

    def residuals(state):
        arrays = copy_state(state['optimizer'])
        return {key: array for key, array in arrays.items()
                if key.startswith('compression/') and array.dtype.kind == 'f'}

    saved = start(comm)
    x = np.random.RandomState(comm.rank).randn(4, 3).astype('f')
    for _ in range(3):
        saved['optimizer'].update(lambda: chainer.functions.sum(saved['model'](x) ** 2))
    saver = chainermn.create_multi_node_checkpointer('run', comm, path=folder)
    saver.save(saved, 3)
    saver._saver.lock.release()
    alone = comm.split(comm.rank, 0)
    if comm.rank == 0:
        loaded = start(alone)
        loader = chainermn.create_multi_node_checkpointer('run', alone, path=folder)
        assert loader.maybe_load(loaded) == 3
        loader._saver.lock.release()
        found, expected = residuals(loaded), residuals(saved)
        assert found.keys() == expected.keys() != set()
        assert any(array.any() for array in found.values())
        for key, array in expected.items():
            np.testing.assert_array_equal(found[key], array)
    comm.barrier()
    alone.finalize()
