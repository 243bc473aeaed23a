"""Each rank loads its file, or one rank reads for others; an error of one is an error of all."""
import os

import chainer
import numpy as np
import pytest

from chainermn.communicators import create_communicator
from chainermn.extensions import _loading, _snapshot_files
from chainermn.extensions._choose import Choice


@pytest.fixture(scope='module')
def comm():
    return create_communicator('naive')


def written(tmp_path, value):
    model = chainer.links.Linear(2, 2, initialW=value)
    path = str(tmp_path / 'file')
    _snapshot_files.write(path, _snapshot_files.copy_state(model))
    return path


def load(comm, choice, group=None):
    model = chainer.links.Linear(2, 2)
    _loading.load(comm, choice, model, False, group)
    comm.barrier()
    return model.W.array[0, 0]


def test_each_rank_reads_its_own(comm, tmp_path):
    path = written(tmp_path, comm.rank)
    assert load(comm, Choice(1, path, comm.size, False)) == comm.rank


def test_one_rank_reads_for_its_group(comm, tmp_path):
    first = comm.rank // 2 * 2
    path = written(tmp_path, comm.rank) if comm.rank == first else None
    group = comm.split(first, comm.rank)
    assert load(comm, Choice(1, path, comm.size, False), group) == first
    group.finalize()


def test_rank_0_reads_for_all(comm, tmp_path):
    path = written(tmp_path, 7) if comm.rank == 0 else None
    choice = Choice(1, path, comm.size + 1, True)
    if comm.rank == 0:
        with pytest.warns(RuntimeWarning, match=f'by {comm.size + 1} ranks and is loaded on '
                                                f'{comm.size}'):
            assert load(comm, choice) == 7
    else:
        assert load(comm, choice) == 7


@pytest.mark.parametrize('is_for_all', [True, False])
def test_a_file_that_is_gone_is_one_error(comm, tmp_path, is_for_all):
    path = written(tmp_path, 7)
    reader = 0 if is_for_all else comm.size - 1
    if comm.rank == reader:
        os.remove(path)
    with pytest.raises(FileNotFoundError) as caught:
        load(comm, Choice(1, path, comm.size, is_for_all))
    assert len(set(comm.allgather_obj(str(caught.value)))) == 1


def test_a_model_of_another_shape_on_one_rank_is_one_error(comm, tmp_path):
    path = written(tmp_path, 7)
    model = chainer.links.Linear(3 if comm.rank == comm.size - 1 else 2, 2)
    with pytest.raises(ValueError, match='broadcast') as caught:
        _loading.load(comm, Choice(1, path, comm.size, False), model, False)
        comm.barrier()
    assert len(set(comm.allgather_obj(str(caught.value)))) == 1


def test_python_objects_are_refused_before_anything_is_loaded(comm, tmp_path):
    path = str(tmp_path / 'file.npz')
    last = comm.rank == comm.size - 1
    objects = np.array([None], dtype=object) if last else np.zeros(1)
    np.savez(path, W=np.ones((2, 2)), b=np.ones(2), z=objects)
    model = chainer.links.Linear(2, 2, initialW=5)
    with pytest.raises(ValueError, match="'z' is an array of Python objects") as caught:
        _loading.load(comm, Choice(1, path, comm.size, False), model, False)
        comm.barrier()
    assert len(set(comm.allgather_obj(str(caught.value)))) == 1
    if last:
        assert (model.W.array == 5).all()
