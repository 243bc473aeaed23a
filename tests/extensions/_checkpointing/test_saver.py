"""Writing the files of saves, and removing obsolete ones, one step at a time."""

import numpy as np
import pytest

from chainermn.extensions._checkpointing.save_names import SaveNames
from chainermn.extensions._checkpointing.saver import Save, Saver


@pytest.fixture
def names(comm, tmp_path):
    return SaveNames(comm.bcast_obj(str(tmp_path)), lambda number, rank: f'run.{rank}.{number}')


def make_saver(comm, names):
    def find_obsolete(save):
        return [i for i in names.find(0) if i <= save.iteration][:-1]

    return Saver(comm, 'the state', range(comm.size), find_obsolete)


def save_of(comm, names, iteration):
    return Save(iteration, names.path(iteration, comm.rank), {'x': np.arange(10)}, names=names)


def found(comm, names):
    comm.barrier()
    numbers = list(names.find(comm.rank))
    comm.barrier()
    return numbers


def save(comm, names, saver, iteration):
    saver.complete(iteration)
    saver.start(save_of(comm, names, iteration))
    saver.background.wait()
    return found(comm, names)


def test_the_memory_of_a_save_is_free_when_it_is_written(comm, names):
    saver = make_saver(comm, names)
    one = save_of(comm, names, 1)
    saver.start(one)
    saver.background.wait()
    assert one.arrays is None and one.is_written
    saver.flush()


def test_an_iteration_that_is_saved_again_is_not_removed(comm, names):
    saver = make_saver(comm, names)
    for iteration in (1, 2, 3, 1, 1):
        save(comm, names, saver, iteration)
        saver.complete(None)
    saver.flush()
    assert found(comm, names) == [1, 3]
