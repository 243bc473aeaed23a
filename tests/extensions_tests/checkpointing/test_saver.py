"""Writing files and manifests, and removing obsolete ones, one step at a time."""
import os

import numpy as np
import pytest

from chainermn.communicators import create_communicator
from chainermn.extensions._checkpointing.manifest import (
    Manifest,
    SaveName,
    SaveNames,
    remove_manifest,
)
from chainermn.extensions._checkpointing.saver import Save, Saver


@pytest.fixture(scope='module')
def comm():
    return create_communicator('naive')


@pytest.fixture
def names(comm, tmp_path):
    return SaveNames(comm.bcast_obj(str(tmp_path)),
                     lambda iteration: SaveName('run.', f'.{iteration}'))


def make_saver(comm, names, keep=1, is_alone=False):
    writers = [0] if is_alone else list(range(comm.size))

    def find_obsolete(save):
        past = sorted(i for i in names.find(0) if i <= save.iteration)
        return [names.of(i) for i in past[:-keep]]

    return Saver(comm, 'the state', writers, find_obsolete, is_alone)


def save_of(comm, names, iteration, on_written=None):
    return Save(iteration, names.path(iteration, None), names.path(iteration, comm.rank),
                {'x': np.arange(10)}, on_written=on_written)


def save(comm, names, saver, iteration):
    saver.complete(iteration)
    saver.start(save_of(comm, names, iteration))
    saver.background.wait()
    comm.barrier()
    there = {who: sorted(names.find(who)) for who in (None, comm.rank)}
    comm.barrier()
    return there[None], there[comm.rank]


def test_the_next_save_writes_the_manifest_and_the_one_after_removes_obsolete_files(comm, names):
    saver = make_saver(comm, names)
    assert save(comm, names, saver, 1) == ([], [1])
    assert save(comm, names, saver, 2) == ([1], [1, 2])
    assert save(comm, names, saver, 3) == ([2], [1, 2, 3])
    assert save(comm, names, saver, 4) == ([3], [2, 3, 4])
    saver.flush()
    comm.barrier()
    assert sorted(names.find(None)) == [4] and sorted(names.find(comm.rank)) == [4]


def test_an_only_writer_writes_the_manifest_at_once(comm, names):
    saver = make_saver(comm, names, is_alone=True)
    if comm.rank == 0:
        done = []
        for iteration in (1, 2):
            saver.wait()
            saver.start(save_of(comm, names, iteration, lambda: done.append(1)))
        saver.wait()
        assert sorted(names.find(None)) == sorted(names.find(0)) == [2]
        assert len(done) == 2 and saver.pop_failure() is None
        assert Manifest.read(names.path(2, None)).size == comm.size


def test_the_memory_of_a_save_is_free_when_it_is_written(comm, names):
    saver = make_saver(comm, names)
    one = save_of(comm, names, 1)
    saver.start(one)
    saver.background.wait()
    assert one.arrays is None and one.record is not None
    saver.flush()


def test_a_failure_is_raised_once_and_the_save_before_gets_its_manifest_later(comm, names):
    saver = make_saver(comm, names, keep=5)
    save(comm, names, saver, 1)
    if comm.rank == comm.size - 1:
        os.mkdir(f'{names.folder}/tmp-run.{comm.rank}.2.part')
    comm.barrier()
    save(comm, names, saver, 2)
    with pytest.raises(OSError, match='the state of iteration 2 was not saved') as caught:
        saver.complete(3)
    assert len(set(comm.allgather_obj(str(caught.value)))) == 1
    assert save(comm, names, saver, 3)[0] == [1]
    saver.flush()
    comm.barrier()
    assert sorted(names.find(None)) == [1, 3]


def test_an_iteration_that_is_saved_again_is_not_removed(comm, names):
    saver = make_saver(comm, names)
    for iteration in (1, 2, 3, 1, 1):
        save(comm, names, saver, iteration)
        saver.complete(None)
    saver.flush()
    comm.barrier()
    assert sorted(names.find(comm.rank)) == [1, 3]


def test_a_manifest_is_removed_with_the_files_of_ranks_that_do_not_exist(comm, names):
    saver = make_saver(comm, names)
    save(comm, names, saver, 1)
    saver.flush()
    if comm.rank == 0:
        with open(names.path(1, None)) as file:
            content = file.read()
        remove_manifest(names.folder, SaveName('run.', '.1'), range(comm.size))
        assert sorted(os.listdir(names.folder)) == [f'run.{rank}.1' for rank in range(comm.size)]
        with open(names.path(1, None), 'w') as file:
            file.write(content)
        remove_manifest(names.folder, names.of(1), [0])
        assert os.listdir(names.folder) == ['run.0.1']
        remove_manifest(names.folder, names.of(1), [0])  # nothing to do
    comm.barrier()
