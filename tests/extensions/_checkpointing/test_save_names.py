"""The files of a checkpoint are found by their names, and removed."""
import os

import pytest

from chainermn.extensions._checkpointing.save_names import SaveNames

pytestmark = pytest.mark.mpi_skip


def names_in(folder):
    return SaveNames(str(folder), lambda number, rank: f'a.b.{rank}.{number}')


def fill(folder, *names):
    for name in names:
        (folder / name).touch()


def test_files_are_found_by_number(tmp_path):
    names = names_in(tmp_path)
    fill(tmp_path, 'a.b.0.12', 'a.b.0.5', 'a.b.1.5', 'a.0.7', 'a.b.0.x', 'a.b.0.',
         'tmp-a.b.0.6.part', 'a.b.c.0.8')
    found = names.find(0)
    assert found == {i: str(tmp_path / f'a.b.0.{i}') for i in (5, 12)} and list(found) == [5, 12]
    assert names_in(tmp_path / 'none').find(0) == {}
    assert names.find_temporary(0) == [str(tmp_path / 'tmp-a.b.0.6.part')]


def test_rank_0_also_removes_files_of_ranks_that_do_not_exist(tmp_path):
    names = names_in(tmp_path)
    others = ['a.b.0.1', 'a.b.1.5.x', 'a.1.5', 'b.7.5']
    fill(tmp_path, 'a.b.0.5', 'a.b.1.5', 'a.b.2.5', 'a.b.13.5', *others)
    names.remove(5, 1, range(2))
    assert set(os.listdir(tmp_path)) == {'a.b.0.5', 'a.b.2.5', 'a.b.13.5', *others}
    names.remove(5, 0, range(2))
    assert set(os.listdir(tmp_path)) == set(others)
    names.remove(5, 0, range(2))  # nothing to do


def test_locks_are_found_by_rank(tmp_path):
    names = names_in(tmp_path)
    fill(tmp_path, 'tmp-a.b.0.N.lock', 'tmp-a.b.12.N.lock', 'tmp-a.b.x.N.lock', 'tmp-b.1.N.lock',
         'tmp-a.b.1.5.lock', 'a.b.2.N')
    assert names.find_locks() == {0: names.lock_path(0), 12: names.lock_path(12)}


def test_folders_are_not_saves(tmp_path):
    names = names_in(tmp_path)
    for name in ('a.b.0.5', 'a.b.3.6', 'a.b.1.x'):
        (tmp_path / name).mkdir()
    fill(tmp_path, 'a.b.0.6')
    assert list(names.find(0)) == [6]
    names.remove(6, 0, [0])
    assert set(os.listdir(tmp_path)) == {'a.b.0.5', 'a.b.3.6', 'a.b.1.x'}
    names.check_no_folder(1)
    with pytest.raises(OSError, match=r'/a\.b\.0\.5 is a folder.*Move or rename'):
        names.check_no_folder(0)
