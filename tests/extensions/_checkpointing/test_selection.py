"""All ranks select the same checkpoint; damaged ones are listed and skipped."""
import contextlib
import os
import warnings

import numpy as np
import pytest
from shared_fixtures import raises_on_all

from chainermn.extensions._checkpointing import rank_file
from chainermn.extensions._checkpointing.npz import Arrays
from chainermn.extensions._checkpointing.rank_file import Tag
from chainermn.extensions._checkpointing.save_names import SaveNames
from chainermn.extensions._checkpointing.selection import select


@pytest.fixture(params=['shared', 'each its own'])
def names(request, comm, tmp_path):
    """Names of files in one folder for all ranks, or in one per rank, as on disks of nodes."""
    folder = str(tmp_path)
    if request.param == 'shared':
        folder = comm.bcast_obj(folder)
    return names_in(folder)


def names_in(folder):
    return SaveNames(folder, lambda number, rank: f'run.{rank}.{number}')


def save(comm, names, iteration, save='a'):
    """Write the file of each rank."""
    tag = Tag(f'{save}-{iteration}', iteration, comm.size, list(range(comm.size)), comm.rank)
    rank_file.write(names.path(iteration, comm.rank), {'x': np.full(100, iteration)}, tag)
    comm.barrier()


def selected(comm, names, warning=None):
    with (pytest.warns(RuntimeWarning, match=warning) if warning and comm.rank == 0
          else contextlib.nullcontext()):
        selection = select(comm, names, range(comm.size))
    if selection is None:
        return None
    with Arrays(selection.path, selection.path) as arrays:
        assert (arrays['x'] == selection.iteration).all()
    comm.barrier()  # files are damaged only after all ranks have read them
    return selection.iteration


def damage(path):
    with open(path, 'r+b') as file:
        file.truncate(os.path.getsize(path) - 1)


def on(comm, rank, function, *args):
    if comm.rank == rank % comm.size:
        function(*args)
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_files_of_two_runs_are_not_taken_for_one(comm, names):
    """Two runs were killed while they saved the same iteration."""
    save(comm, names, 1)
    save(comm, names, 2, save='a' if comm.rank else 'b')
    assert selected(comm, names, '(?s)iteration 2\n.*rank 1: .* to a different checkpoint') == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('lost', [0, -1])
def test_the_missing_file_of_any_rank_is_a_warning_only_if_no_newer_save_is_complete(
        comm, names, lost):
    for iteration in (1, 2, 3):
        save(comm, names, iteration)
    rank = lost % comm.size
    on(comm, lost, os.remove, names.path(1, rank))  # as if cleaning was interrupted
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert selected(comm, names) == 3
    on(comm, lost, os.remove, names.path(3, rank))
    missing = f'skipped iteration 3\n  rank {rank}: .*run.{rank}.3: the file is missing$'
    assert selected(comm, names, missing) == 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_another_number_of_ranks_needs_all_files(comm, names):
    """On the disk of any rank, unless only rank 0 is there."""
    for iteration in (1, 2):
        save(comm, names, iteration)
    last = comm.size - 1
    is_shared = os.path.exists(names.path(1, (comm.rank + 1) % comm.size))
    group = comm.split(int(comm.rank == last), comm.rank)  # all but one, and that one
    if comm.rank != last and is_shared:
        assert selected(group, names) == 2
    comm.barrier()
    on(comm, -1, damage, names.path(2, last))
    if comm.rank != last and is_shared:
        assert selected(group, names, f'rank {last}: .*run.{last}.2: ') == 1
    elif comm.rank != last:
        assert selected(group, names, rf'rank {last}: .*run.{last}.\d: the file is missing') is None
    comm.barrier()


@pytest.mark.mpi(min_size=3)
def test_another_number_of_ranks_finds_files_on_several_disks(comm, tmp_path):
    """The last rank has none; the files of ranks 0 and 1 are in different folders."""
    names = names_in(str(tmp_path))
    group = comm.split(int(comm.rank > 1), comm.rank)
    if comm.rank < 2:
        save(group, names, 3)
    comm.barrier()
    selection = select(comm, names, range(comm.size))
    assert (selection.iteration, selection.size, selection.is_for_all) == (3, 2, True)


def write_old(names, rank, iteration):
    np.savez(names.path(iteration, rank), x=np.full(10, iteration))
    os.rename(f'{names.path(iteration, rank)}.npz', names.path(iteration, rank))


def test_files_of_chainermn_7(comm, names):
    save(comm, names, 1)
    for iteration in (5, 6, 7):
        write_old(names, comm.rank, iteration)
    comm.barrier()
    assert selected(comm, names) == 7
    on(comm, -1, damage, names.path(7, comm.size - 1))
    assert selected(comm, names, f'rank {comm.size - 1}: .*run.{comm.size - 1}.7') == 6
    for iteration in (5, 6, 7):
        with contextlib.suppress(FileNotFoundError):
            os.remove(names.path(iteration, comm.rank))
    comm.barrier()
    assert selected(comm, names) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('old', [0, 1])
def test_a_file_of_chainermn_7_and_one_of_ours_are_no_save(comm, names, old):
    for iteration in (1, 2):
        save(comm, names, iteration)
    on(comm, old, write_old, names, old, 2)
    assert selected(comm, names, 'belongs to a different checkpoint than the first file') == 1


def test_files_of_chainermn_7_of_more_ranks(comm, tmp_path):
    names = names_in(comm.bcast_obj(str(tmp_path)))
    write_old(names, comm.rank, 5)
    on(comm, 0, write_old, names, comm.size, 5)
    assert selected(comm, names, f'there is also a file of rank {comm.size}') is None


def test_a_folder_that_cannot_be_read(comm, tmp_path, monkeypatch):
    """On one rank; all ranks raise the same error."""
    names = names_in(comm.bcast_obj(str(tmp_path)))

    def listdir(folder):
        raise PermissionError(13, 'Permission denied', folder)

    if comm.rank == 0:
        monkeypatch.setattr(os, 'listdir', listdir)
    with raises_on_all(PermissionError, match='Permission denied'):
        select(comm, names, range(comm.size))


def write_deep_tag(path):
    """A tag that raises RecursionError."""
    text = np.frombuffer(b'[' * 100_000, np.uint8)
    with open(path, 'wb') as file:
        np.savez(file, **{'chainermn/save': text})


def set_encrypted(path):
    """Set the bit for encryption; reading the file then raises RuntimeError."""
    with open(path, 'r+b') as file:
        file.seek(file.read().index(b'PK\1\2') + 8)
        file.write(b'\1')


@pytest.mark.parametrize('spoil', [write_deep_tag, set_encrypted])
def test_files_that_raise_errors_of_other_types(comm, names, spoil):
    """Rank 0 reads the tag of its file first."""
    save(comm, names, 1)
    save(comm, names, 2)
    rank = 0 if spoil is write_deep_tag else comm.size - 1
    on(comm, rank, spoil, names.path(2, rank))
    assert selected(comm, names, 'skipped iteration 2') == 1
