"""All ranks select the same save; damaged ones are named and skipped."""
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
from chainermn.extensions._checkpointing import rank_file
from chainermn.extensions._checkpointing.manifest import Manifest, SaveName, SaveNames
from chainermn.extensions._checkpointing.npz import Arrays
from chainermn.extensions._checkpointing.rank_file import Tag, digest
from chainermn.extensions._checkpointing.selection import select


@pytest.fixture(scope='module')
def comm():
    return create_communicator('naive')


@pytest.fixture(params=['shared', 'each its own'])
def names(request, comm, tmp_path):
    """Names of files in one folder for all ranks, or in one per rank, as on disks of nodes."""
    folder = str(tmp_path)
    if request.param == 'shared':
        folder = comm.bcast_obj(folder)
    return names_in(folder)


def names_in(folder):
    return SaveNames(folder, lambda iteration: SaveName('run.', f'.{iteration}'))


def save(comm, names, iteration, manifest=True, save='a', same=True):
    """Write the file of each rank, and the manifest."""
    arrays = {'x': np.full(100, iteration), 'own': np.full(100, 0 if same else comm.rank)}
    tag = Tag(f'{save}-{iteration}', iteration, comm.size, list(range(comm.size)), comm.rank)
    records = comm.allgather_obj(rank_file.write(names.path(iteration, comm.rank), arrays, tag))
    if manifest and comm.rank == 0:
        Manifest(iteration, comm.size, records).write(names.path(iteration, None))
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


def test_the_newest_with_a_manifest(comm, names):
    assert selected(comm, names) is None
    for iteration in (1, 2, 10):
        save(comm, names, iteration)
    assert selected(comm, names) == 10


def test_a_damaged_file_is_named_by_rank_path_and_reason(comm, names):
    for iteration in (1, 2):
        save(comm, names, iteration)
    last = comm.size - 1
    on(comm, -1, damage, names.path(2, comm.rank))
    assert selected(comm, names, f'(?s)skipped the save of iteration 2\n.*rank {last}: .*run.{last}'
                                 '.2: has .* bytes, not .* as in the manifest') == 1


def test_a_damaged_manifest_is_named(comm, names):
    for iteration in (1, 2):
        save(comm, names, iteration)
    on(comm, 0, damage, names.path(2, None))
    assert selected(comm, names, r'commit-run.2: .*changed') == 1


def test_the_manifest_of_another_save(comm, names):
    for iteration in (1, 2):
        save(comm, names, iteration)
    on(comm, 0, shutil.copy, names.path(1, None), names.path(2, None))
    assert selected(comm, names, r'commit-run.2: is the manifest of another save') == 1


def test_a_complete_save_without_manifest_gets_one(comm, names):
    save(comm, names, 1)
    save(comm, names, 2, manifest=False)
    assert selected(comm, names) == 2
    if comm.rank == 0:
        manifest = Manifest.read(names.path(2, None))
        assert (manifest.iteration, manifest.size) == (2, comm.size)
        assert manifest.are_replicas
    on(comm, -1, damage, names.path(2, comm.rank))
    assert selected(comm, names, 'not .* as in the manifest') == 1


@pytest.mark.parametrize('what', ['missing', 'damaged'])
def test_an_incomplete_save_without_manifest(comm, names, what):
    save(comm, names, 1)
    save(comm, names, 2, manifest=False)
    if what == 'missing':  # usual after a job was killed; needs no warning
        on(comm, -1, os.remove, names.path(2, comm.rank))
        assert selected(comm, names) == 1
    else:
        on(comm, -1, damage, names.path(2, comm.rank))
        assert selected(comm, names, f'rank {comm.size - 1}: .*run.{comm.size - 1}.2: ') == 1
    if comm.rank == 0:
        assert not os.path.exists(names.path(2, None))


@pytest.mark.mpi(min_size=2)
def test_files_of_two_runs_are_not_taken_for_one(comm, names):
    """Two runs were killed while they saved the same iteration."""
    save(comm, names, 1)
    save(comm, names, 2, manifest=False, save='a' if comm.rank else 'b')
    assert selected(comm, names, '(?s)iteration 2\n.* are of another save than that of rank 0') == 1


@pytest.mark.mpi(min_size=2)
def test_swapped_files(comm):
    for manifest in (True, False):
        names = names_in(comm.bcast_obj(tempfile.mkdtemp() if comm.rank == 0 else None))
        save(comm, names, 1)
        save(comm, names, 2, manifest=manifest, same=False)
        if comm.rank == 0:
            a, b = names.path(2, 0), names.path(2, 1)
            os.rename(a, f'{a}.tmp')
            os.rename(b, a)
            os.rename(f'{a}.tmp', b)
        comm.barrier()
        assert selected(comm, names, 'SHA-256|bytes|is the file of rank 1') == 1
        on(comm, 0, shutil.rmtree, names.folder)


def test_a_warning_if_no_save_is_complete(comm, names):
    save(comm, names, 1, manifest=False)
    on(comm, -1, os.remove, names.path(1, comm.rank))
    if comm.size > 1:
        assert selected(comm, names, 'no save in .* is complete on all ranks') is None


def write_old(names, rank, iteration):
    np.savez(names.path(iteration, rank), x=np.full(10, iteration))
    os.rename(f'{names.path(iteration, rank)}.npz', names.path(iteration, rank))


def test_files_of_older_versions_are_the_last_choice(comm, names):
    for iteration in (5, 6, 7):
        write_old(names, comm.rank, iteration)
    comm.barrier()
    assert selected(comm, names) == 7
    on(comm, -1, damage, names.path(7, comm.rank))
    assert selected(comm, names, f'rank {comm.size - 1}: .*run.{comm.size - 1}.7') == 6
    save(comm, names, 1)
    if comm.size == 1:  # whether the damaged file is of an older version is unknown
        assert selected(comm, names, 'run.0.7') == 1
    else:
        assert selected(comm, names) == 1


def test_files_of_older_versions_of_more_ranks(comm, tmp_path):
    names = names_in(comm.bcast_obj(str(tmp_path)))
    write_old(names, comm.rank, 5)
    on(comm, 0, write_old, names, comm.size, 5)
    assert selected(comm, names, f'there is a file of rank {comm.size}, too') is None


def test_a_folder_that_cannot_be_read(comm, tmp_path, monkeypatch):
    """On one rank; all ranks raise the same error."""
    names = names_in(comm.bcast_obj(str(tmp_path)))

    def listdir(folder):
        raise PermissionError(13, 'Permission denied', folder)

    if comm.rank == 0:
        monkeypatch.setattr(os, 'listdir', listdir)
    with pytest.raises(PermissionError, match='Permission denied') as caught:
        select(comm, names, range(comm.size))
    assert len(set(comm.allgather_obj(str(caught.value)))) == 1


CORRUPTIONS = ['truncate', 'flip', 'delete', 'zeros', 'empty', 'swap', 'edit the manifest',
               'truncate the manifest', 'flip in the manifest', 'append']


def corrupt(kind, names, rng, size):
    """Damages the save of iteration 2 somewhere."""
    rank = rng.randrange(size)
    path = names.path(2, None if kind.endswith('manifest') else rank)
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
    elif kind == 'edit the manifest':
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


@pytest.mark.sample(4)
@pytest.mark.parametrize('kind', CORRUPTIONS)
def test_ten_corruptions_each_are_all_found(comm, tmp_path, kind):
    names = names_in(comm.bcast_obj(str(tmp_path)))
    save(comm, names, 1)
    save(comm, names, 2, same=False)
    undamaged = f'{names.folder}-undamaged'
    on(comm, 0, shutil.copytree, names.folder, undamaged)
    assert selected(comm, names) == 2
    rng = random.Random(kind)
    for _ in range(10):
        on(comm, 0, corrupt, kind, names, rng, comm.size)
        assert selected(comm, names, 'skipped the save of iteration 2') == 1
        on(comm, 0, lambda: shutil.copytree(undamaged, names.folder, dirs_exist_ok=True))
    assert selected(comm, names) == 2


# --- crafted files ----------------------------------------------------------------------------

def write_claim(path, name, count, content=b''):
    """An npz file of one array, which claims to have so many bytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {'descr': '|u1', 'fortran_order': False, 'shape': (count,)})
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr(f'{name}.npy', header.getvalue() + content)


def sign(path, **fields):
    """Change a manifest so that its own SHA-256 is right."""
    with open(path) as file:
        body = {**json.load(file), **fields}
    del body['sha256']
    body['sha256'] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    with open(path, 'w') as file:
        file.write(json.dumps(body, indent=1) + '\n')


def craft(kind, names, last):
    """Put files in the place of iteration 2 that no save would leave."""
    manifest, mine, theirs = names.path(2, None), names.path(2, 0), names.path(2, last)
    if kind == 'deep manifest':
        with open(manifest, 'w') as file:
            file.write('[' * 100_000)
    elif kind == 'odd manifest':
        sign(manifest, files=[{'rank': 0, 'name': 'run.0.2', 'bytes': '1', 'sha256': [],
                               'state': {}, 'buffers': 1.5}])
    elif kind == 'manifest that claims memory':
        write_claim(theirs, 'x', 10 ** 13)
        with open(manifest) as file:
            files = json.load(file)['files']
        size, sha256 = digest(theirs)
        files[last].update(bytes=size, sha256=sha256)
        sign(manifest, files=files)
    else:
        os.remove(manifest)
        if kind == 'tag that claims memory':
            write_claim(mine, 'chainermn/save', 10 ** 13)
        elif kind == 'deep tag':
            write_claim(mine, 'chainermn/save', 100_000, b'[' * 100_000)
        elif kind == 'odd tag':
            text = json.dumps({**dict.fromkeys(Tag._fields, 1), 'writers': 7})
            write_claim(mine, 'chainermn/save', len(text), text.encode())
        else:  # one bit says that it is encrypted
            with open(theirs, 'r+b') as file:
                file.seek(file.read().index(b'PK\1\2') + 8)
                file.write(b'\1')


CRAFTED = ['deep manifest', 'odd manifest', 'manifest that claims memory', 'tag that claims memory',
           'deep tag', 'odd tag', 'encrypted']


@pytest.mark.parametrize('kind', CRAFTED)
def test_crafted_files_are_skipped_by_all_ranks(comm, tmp_path, kind):
    names = names_in(comm.bcast_obj(str(tmp_path)))
    save(comm, names, 1)
    save(comm, names, 2)
    on(comm, 0, craft, kind, names, comm.size - 1)
    iteration = selected(comm, names, 'skipped the save of iteration 2|run.0.2')
    assert comm.allgather_obj(iteration) == [1] * comm.size
