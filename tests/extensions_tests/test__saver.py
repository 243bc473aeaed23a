"""Settling, committing and removing, one step at a time."""
import os

import numpy as np
import pytest

from chainermn.communicators import create_communicator
from chainermn.extensions._commit import Commit, Names
from chainermn.extensions._saver import Save, Saver, on_all_ranks, remove_commit


@pytest.fixture(scope='module')
def comm():
    return create_communicator('naive')


@pytest.fixture
def names(comm, tmp_path):
    return Names(comm.bcast_obj(str(tmp_path)), lambda iteration, rank: (
        f'commit-run.{iteration}' if rank is None else f'run.{rank}.{iteration}'))


def make_saver(comm, names, keep=1, is_alone=False):
    writers = [0] if is_alone else list(range(comm.size))

    def find_stale(save):
        return sorted(i for i in names.find(0) if i <= save.iteration)[:-keep]

    return Saver(comm, 'the state', writers, find_stale, names.path, is_alone)


def save_of(comm, names, iteration, then=None):
    return Save(iteration, names.path(iteration, None), names.path(iteration, comm.rank),
                {'x': np.arange(10)}, set(), then=then)


def save(comm, names, saver, iteration):
    saver.settle(iteration)
    saver.start(save_of(comm, names, iteration))
    saver.background.wait()
    comm.barrier()
    there = {who: sorted(names.find(who)) for who in (None, comm.rank)}
    comm.barrier()
    return there[None], there[comm.rank]


def test_a_save_is_committed_with_the_next_and_what_is_superfluous_goes_after_that(comm, names):
    saver = make_saver(comm, names)
    assert save(comm, names, saver, 1) == ([], [1])
    assert save(comm, names, saver, 2) == ([1], [1, 2])
    assert save(comm, names, saver, 3) == ([2], [1, 2, 3])
    assert save(comm, names, saver, 4) == ([3], [2, 3, 4])
    saver.conclude()
    comm.barrier()
    assert sorted(names.find(None)) == [4] and sorted(names.find(comm.rank)) == [4]


def test_an_only_writer_commits_at_once(comm, names):
    saver = make_saver(comm, names, is_alone=True)
    if comm.rank == 0:
        done = []
        for iteration in (1, 2):
            saver.wait()
            saver.start(save_of(comm, names, iteration, lambda: done.append(1)))
        saver.wait()
        assert sorted(names.find(None)) == sorted(names.find(0)) == [2]
        assert len(done) == 2 and saver.failure() is None
        assert Commit.read(names.path(2, None)).size == comm.size


def test_the_memory_of_a_save_is_free_when_it_is_written(comm, names):
    saver = make_saver(comm, names)
    one = save_of(comm, names, 1)
    saver.start(one)
    saver.background.wait()
    assert one.arrays is None and one.file is not None
    saver.conclude()


def test_what_failed_is_said_once_and_the_one_before_is_committed_later(comm, names):
    saver = make_saver(comm, names, keep=5)
    save(comm, names, saver, 1)
    if comm.rank == comm.size - 1:
        os.mkdir(f'{names.folder}/tmp-run.{comm.rank}.2.part')
    comm.barrier()
    save(comm, names, saver, 2)
    with pytest.raises(OSError, match='the state of iteration 2 was not saved') as caught:
        saver.settle(3)
    assert len(set(comm.allgather_obj(str(caught.value)))) == 1
    assert save(comm, names, saver, 3)[0] == [1]
    saver.conclude()
    comm.barrier()
    assert sorted(names.find(None)) == [1, 3]


def test_what_is_saved_again_is_not_removed(comm, names):
    saver = make_saver(comm, names)
    for iteration in (1, 2, 3, 1, 1):
        save(comm, names, saver, iteration)
        saver.settle(None)
    saver.conclude()
    comm.barrier()
    assert sorted(names.find(comm.rank)) == [1, 3]


def test_a_commit_goes_with_files_of_ranks_that_are_not_there(comm, names):
    saver = make_saver(comm, names)
    save(comm, names, saver, 1)
    saver.conclude()
    if comm.rank == 0:
        with open(names.path(1, None)) as file:
            content = file.read()
        remove_commit(names.path(1, None), [0], lambda rank: f'{names.folder}/other.{rank}.1')
        assert sorted(os.listdir(names.folder)) == [f'run.{rank}.1' for rank in range(comm.size)]
        with open(names.path(1, None), 'w') as file:
            file.write(content)
        remove_commit(names.path(1, None), [0], lambda rank: names.path(1, rank))
        assert os.listdir(names.folder) == ['run.0.1']
        remove_commit(names.path(1, None), [0], lambda rank: '')  # nothing to do
    comm.barrier()


def test_what_one_rank_raises_all_raise(comm):
    with pytest.raises(ZeroDivisionError, match='on purpose'):
        with on_all_ranks(comm, 'a test'):
            if comm.rank == comm.size - 1:
                raise ZeroDivisionError('on purpose')
        comm.barrier()
