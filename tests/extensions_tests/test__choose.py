"""The ranks choose together; what is damaged is named, and passed over by all of them."""
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import tempfile
import zipfile

import numpy as np
import pytest

from chainermn.communicators import create_communicator
from chainermn.extensions import _snapshot_files
from chainermn.extensions._arrays import Arrays
from chainermn.extensions._choose import choose
from chainermn.extensions._commit import Commit, File, Names, digest


@pytest.fixture(scope='module')
def comm():
    return create_communicator('naive')


@pytest.fixture(params=['shared', 'each its own'])
def names(request, comm, tmp_path):
    """Of files in one folder for all ranks, or in a folder of each rank, as on disks of nodes."""
    folder = str(tmp_path)
    if request.param == 'shared':
        folder = comm.bcast_obj(folder)
    return names_in(folder)


def names_in(folder):
    return Names(folder, lambda iteration, rank: (
        f'commit-run.{iteration}' if rank is None else f'run.{rank}.{iteration}'))


def save(comm, names, iteration, commit=True, save='a', same=True):
    """Writes the file of each rank, and the commit file."""
    arrays = {'x': np.full(100, iteration), 'own': np.full(100, 0 if same else comm.rank)}
    tag = _snapshot_files.Tag(
        f'{save}-{iteration}', iteration, comm.size, list(range(comm.size)), comm.rank)
    path = names.path(iteration, comm.rank)
    files = comm.allgather_obj(File.of(path, _snapshot_files.write(path, arrays, tag=tag)))
    if commit and comm.rank == 0:
        Commit(iteration, comm.size, files).write(names.path(iteration, None))
    comm.barrier()


def chosen(comm, names, warning=None):
    with (pytest.warns(RuntimeWarning, match=warning) if warning and comm.rank == 0
          else contextlib.nullcontext()):
        choice = choose(comm, names, range(comm.size))
    if choice is None:
        return None
    with Arrays(choice.path, choice.path) as arrays:
        assert (arrays['x'] == choice.iteration).all()
    comm.barrier()  # who damages files then does it behind nobody's back
    return choice.iteration


def damage(path):
    with open(path, 'r+b') as file:
        file.truncate(os.path.getsize(path) - 1)


def on(comm, rank, verb, *args):
    if comm.rank == rank % comm.size:
        verb(*args)
    comm.barrier()


def test_the_newest_that_was_committed(comm, names):
    assert chosen(comm, names) is None
    for iteration in (1, 2, 10):
        save(comm, names, iteration)
    assert chosen(comm, names) == 10


def test_a_damaged_file_is_named_by_rank_path_and_reason(comm, names):
    for iteration in (1, 2):
        save(comm, names, iteration)
    last = comm.size - 1
    on(comm, -1, damage, names.path(2, comm.rank))
    assert chosen(comm, names, f'(?s)iteration 2 is passed over.*rank {last}: .*run.{last}.2: has '
                               '.* bytes, not the .* that were committed') == 1


def test_a_damaged_commit_file_is_named(comm, names):
    for iteration in (1, 2):
        save(comm, names, iteration)
    on(comm, 0, damage, names.path(2, None))
    assert chosen(comm, names, r'commit-run.2: .*changed') == 1


def test_the_commit_file_of_another_save(comm, names):
    for iteration in (1, 2):
        save(comm, names, iteration)
    on(comm, 0, shutil.copy, names.path(1, None), names.path(2, None))
    assert chosen(comm, names, r'commit-run.2: is of another save') == 1


def test_what_was_not_committed_any_more_is_committed_if_it_is_whole(comm, names):
    save(comm, names, 1)
    save(comm, names, 2, commit=False)
    assert chosen(comm, names) == 2
    if comm.rank == 0:
        commit = Commit.read(names.path(2, None))
        assert (commit.iteration, commit.size) == (2, comm.size) and commit.are_replicas
    on(comm, -1, damage, names.path(2, comm.rank))
    assert chosen(comm, names, 'not the .* that were committed') == 1


@pytest.mark.parametrize('what', ['missing', 'damaged'])
def test_what_was_not_committed_and_is_not_whole(comm, names, what):
    save(comm, names, 1)
    save(comm, names, 2, commit=False)
    if what == 'missing':  # as usual when a job was killed; nobody has to be told
        on(comm, -1, os.remove, names.path(2, comm.rank))
        assert chosen(comm, names) == 1
    else:
        on(comm, -1, damage, names.path(2, comm.rank))
        assert chosen(comm, names, f'rank {comm.size - 1}: .*run.{comm.size - 1}.2: ') == 1
    if comm.rank == 0:
        assert not os.path.exists(names.path(2, None))


@pytest.mark.mpi(min_size=2)
def test_files_of_two_runs_are_not_taken_for_one(comm, names):
    """Two runs were killed while they saved the same iteration."""
    save(comm, names, 1)
    save(comm, names, 2, commit=False, save='a' if comm.rank else 'b')
    assert chosen(comm, names, '(?s)iteration 2 .* are of another save than that of rank 0') == 1


@pytest.mark.mpi(min_size=2)
def test_swapped_files(comm):
    for commit in (True, False):
        names = names_in(comm.bcast_obj(tempfile.mkdtemp() if comm.rank == 0 else None))
        save(comm, names, 1)
        save(comm, names, 2, commit=commit, same=False)
        if comm.rank == 0:
            a, b = names.path(2, 0), names.path(2, 1)
            os.rename(a, f'{a}.tmp')
            os.rename(b, a)
            os.rename(f'{a}.tmp', b)
        comm.barrier()
        assert chosen(comm, names, 'SHA-256|bytes|is that of rank 1') == 1
        on(comm, 0, shutil.rmtree, names.folder)


def test_nothing_whole_is_said(comm, names):
    save(comm, names, 1, commit=False)
    on(comm, -1, os.remove, names.path(1, comm.rank))
    if comm.size > 1:
        assert chosen(comm, names, 'no save in .* is whole on all ranks') is None


def write_old(names, rank, iteration):
    np.savez(names.path(iteration, rank), x=np.full(10, iteration))
    os.rename(f'{names.path(iteration, rank)}.npz', names.path(iteration, rank))


def test_files_of_older_versions_come_after_those_that_were_committed(comm, names):
    for iteration in (5, 6, 7):
        write_old(names, comm.rank, iteration)
    comm.barrier()
    assert chosen(comm, names) == 7
    on(comm, -1, damage, names.path(7, comm.rank))
    assert chosen(comm, names, f'rank {comm.size - 1}: .*run.{comm.size - 1}.7') == 6
    save(comm, names, 1)
    if comm.size == 1:  # the damaged file is new or old, nobody knows
        assert chosen(comm, names, 'run.0.7') == 1
    else:
        assert chosen(comm, names) == 1


def test_files_of_older_versions_of_more_ranks(comm, tmp_path):
    names = names_in(comm.bcast_obj(str(tmp_path)))
    write_old(names, comm.rank, 5)
    on(comm, 0, write_old, names, comm.size, 5)
    assert chosen(comm, names, f'there is a file of rank {comm.size}, too') is None


def test_a_folder_that_cannot_be_read(comm, tmp_path, monkeypatch):
    """On one rank; all raise the same."""
    names = names_in(comm.bcast_obj(str(tmp_path)))

    def listdir(folder):
        raise PermissionError(13, 'Permission denied', folder)

    if comm.rank == 0:
        monkeypatch.setattr(os, 'listdir', listdir)
    with pytest.raises(PermissionError, match='Permission denied') as caught:
        choose(comm, names, range(comm.size))
    assert len(set(comm.allgather_obj(str(caught.value)))) == 1


CORRUPTIONS = ['truncate', 'flip', 'delete', 'zeros', 'empty', 'swap', 'edit the commit',
               'truncate the commit', 'flip in the commit', 'append']


def corrupt(kind, names, rng, size):
    """Damages the save of iteration 2 somewhere."""
    rank = rng.randrange(size)
    path = names.path(2, None if kind.endswith('commit') else rank)
    with open(path, 'rb') as file:
        content = file.read()
    at = rng.randrange(len(content))
    if kind.startswith('truncate'):
        content = content[:at]
    elif kind.startswith('flip'):
        content = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1:]
    elif kind == 'zeros':
        at = min(at, len(content) // 2)  # where not all is zero already
        content = content[:at] + bytes(len(content) - at)
    elif kind == 'empty':
        content = b''
    elif kind == 'append':
        content += bytes([rng.randrange(256)])
    elif kind == 'edit the commit':
        content = content.replace(b'"ranks": ', b'"ranks": 1')
    if kind == 'delete':
        os.remove(path)
    elif kind == 'swap':
        other = names.path(2, (rank + 1) % size) if size > 1 else names.path(1, 0)
        content = content if size > 1 else b''
        shutil.copy(other, path)
        if size > 1:
            with open(other, 'wb') as file:
                file.write(content)
    else:
        with open(path, 'wb') as file:
            file.write(content)


@pytest.mark.parametrize('kind', CORRUPTIONS)
def test_ten_corruptions_each_are_all_found(comm, tmp_path, kind):
    names = names_in(comm.bcast_obj(str(tmp_path)))
    save(comm, names, 1)
    save(comm, names, 2, same=False)
    whole = f'{names.folder}-whole'
    on(comm, 0, shutil.copytree, names.folder, whole)
    assert chosen(comm, names) == 2
    rng = random.Random(kind)
    for _ in range(10):
        on(comm, 0, corrupt, kind, names, rng, comm.size)
        assert chosen(comm, names, 'iteration 2 is passed over') == 1
        on(comm, 0, lambda: shutil.copytree(whole, names.folder, dirs_exist_ok=True))
    assert chosen(comm, names) == 2


# --- crafted files ----------------------------------------------------------------------------

def write_claim(path, name, count, content=b''):
    """An npz file of one array, which claims to have so many bytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {'descr': '|u1', 'fortran_order': False, 'shape': (count,)})
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr(f'{name}.npy', header.getvalue() + content)


def sign(path, **fields):
    """Changes a commit file so that its own SHA-256 is right."""
    with open(path) as file:
        body = {**json.load(file), **fields}
    del body['sha256']
    body['sha256'] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    with open(path, 'w') as file:
        file.write(json.dumps(body, indent=1) + '\n')


def craft(kind, names, last):
    """Makes of iteration 2 what no save has left."""
    commit, mine, theirs = names.path(2, None), names.path(2, 0), names.path(2, last)
    if kind == 'deep commit':
        with open(commit, 'w') as file:
            file.write('[' * 100_000)
    elif kind == 'odd commit':
        sign(commit, files=[{'rank': 0, 'name': 'run.0.2', 'bytes': '1', 'sha256': [], 'state': {},
                             'buffers': 1.5}])
    elif kind == 'commit that claims memory':
        write_claim(theirs, 'x', 10 ** 13)
        with open(commit) as file:
            files = json.load(file)['files']
        size, sha256 = digest(theirs)
        files[last].update(bytes=size, sha256=sha256)
        sign(commit, files=files)
    else:
        os.remove(commit)
        if kind == 'tag that claims memory':
            write_claim(mine, 'chainermn/save', 10 ** 13)
        elif kind == 'deep tag':
            write_claim(mine, 'chainermn/save', 100_000, b'[' * 100_000)
        elif kind == 'odd tag':
            text = json.dumps({**dict.fromkeys(_snapshot_files.Tag._fields, 1), 'writers': 7})
            write_claim(mine, 'chainermn/save', len(text), text.encode())
        else:  # one bit says that it is encrypted
            with open(theirs, 'r+b') as file:
                file.seek(file.read().index(b'PK\1\2') + 8)
                file.write(b'\1')


CRAFTED = ['deep commit', 'odd commit', 'commit that claims memory', 'tag that claims memory',
           'deep tag', 'odd tag', 'encrypted']


@pytest.mark.parametrize('kind', CRAFTED)
def test_crafted_files_are_passed_over_by_all_ranks(comm, tmp_path, kind):
    names = names_in(comm.bcast_obj(str(tmp_path)))
    save(comm, names, 1)
    save(comm, names, 2)
    on(comm, 0, craft, kind, names, comm.size - 1)
    iteration = chosen(comm, names, 'iteration 2 is passed over|run.0.2')
    assert comm.allgather_obj(iteration) == [1] * comm.size
