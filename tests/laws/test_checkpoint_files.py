"""Laws of checkpoint files: replica sets, damaged files, and the removal of old files."""

import os
import shutil

import chainer
import numpy as np
import pytest
from chainer import iterators, optimizers
from chainer.training import extensions
from hypothesis import strategies as st
from killed_jobs import some_of
from laws.law import law, planted
from laws.saves import MARKS, assert_same, checkpointer_of, folder_of, killed
from laws.training import state

from chainermn.extensions import _multi_node_snapshot as snapshot_module
from chainermn.extensions import checkpoint as checkpoint_module
from chainermn.extensions import multi_node_snapshot
from chainermn.extensions._checkpointing import rank_file

pytestmark = MARKS


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
    """A fault: all ranks read the file of the first writer."""
    def changed(comm, names, writers):
        found = select(comm, names, writers)
        return found and found._replace(path=names.path(found.iteration, writers[0]))
    return changed


@law(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5),
               st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=3),
               st.sampled_from([-1, 1, 2])),
     planted(snapshot_module, 'select', first_file))
@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings('ignore:skipped iteration')
def test_replica_sets(comm, program, tmp_path):
    """Each rank loads its replica set's state at the newest iteration that all sets have."""
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
#: The file of a different checkpoint of the same iteration.
DAMAGES['of another checkpoint'] = DAMAGES['of another rank']


@law(st.tuples(st.booleans(), st.dictionaries(
    st.tuples(st.integers(1, 3), st.integers(0, 9)), st.tuples(
        st.sampled_from(['flipped'] * 8 + [*DAMAGES]), st.floats(0, .999), st.integers(0, 7)),
    min_size=1, max_size=4)), planted(rank_file, '_has_right_digest', lambda f: lambda path: True),
    examples=12)
@pytest.mark.filterwarnings('ignore:skipped iteration')
def test_damaged_files(comm, program, tmp_path):
    """The newest undamaged checkpoint is loaded, if there is one, even by fewer ranks."""
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
                          f'{older}/run.{rank}.{iteration}' if kind == 'of another checkpoint' else
                          f'{kept}/run.{(rank + 1) % comm.size}.{iteration}', fraction, bit)
        shutil.rmtree(kept)
    comm.barrier()
    kinds = {each: {damaged.get((each, rank), [''])[0] for rank in range(comm.size)}
             for each in (1, 2, 3)}
    bad = {each for each, found in kinds.items()
           if found not in ({''}, {'of another checkpoint'})
           and (comm.size > 1 or found != {'of another rank'})}
    expected = max({1, 2, 3} - bad, default=None)
    group = some_of(comm, max(1, comm.size - 1)) if is_resized else comm
    model.W.array[...] = 99
    if group is not None:
        loader = checkpointer_of(group, folder)
        assert group.allgather_obj(loader.maybe_load(model)) == [expected] * group.size
        loader._saver.lock.release()
        assert (model.W.array == (99 if expected is None else expected + (
            0 if is_resized else 10 * comm.rank))).all()


def one_save_late(find):
    """A fault: each checkpoint is removed one checkpoint too late."""
    def changed(self, save):
        obsolete = find(self, save)
        return obsolete[:-1] if len(obsolete) > 1 else obsolete
    return changed


@law(st.tuples(st.integers(1, 3), st.integers(1, 3), st.lists(st.tuples(
    st.integers(-1, 2), st.booleans(), st.booleans()), min_size=4, max_size=10)),
    planted(checkpoint_module.MultiNodeCheckpointer, '_find_obsolete', one_save_late), examples=10)
def test_cleanup(comm, program, tmp_path):
    """Cleanup keeps the newest checkpoints, as the intervals define, and each can be loaded."""
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
