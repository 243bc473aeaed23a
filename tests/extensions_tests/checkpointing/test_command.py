"""A folder is verified, and each problem named."""
import os
import subprocess
import sys

import numpy as np
import pytest
from time_limits import seconds

from chainermn.extensions._checkpointing import rank_file
from chainermn.extensions._checkpointing.command import verify_folder
from chainermn.extensions._checkpointing.manifest import Manifest


def save(folder, iteration, size=2, manifest=True):
    records = []
    for rank in range(size):
        path = str(folder / f'run.{rank}.{iteration}')
        tag = rank_file.Tag(f'a-{iteration}', iteration, size, list(range(size)), rank)
        records.append(rank_file.write(path, {'x': np.arange(5)}, tag))
    if manifest:
        Manifest(iteration, size, records).write(str(folder / f'commit-run.{iteration}'))


def save_older(path):
    with open(path, 'wb') as file:
        np.savez(file, x=np.arange(100))


def damage(path):
    content = bytearray(path.read_bytes())
    content[content.index(np.arange(5).tobytes())] ^= 1
    path.write_bytes(content)


def test_each_save_and_its_problems(tmp_path):
    assert verify_folder(str(tmp_path)) == []
    for iteration in (10, 9, 8):
        save(tmp_path, iteration)
    save(tmp_path, 11, manifest=False)
    os.remove(tmp_path / 'run.1.9')
    (tmp_path / 'commit-run.8').write_text('{}')
    (tmp_path / 'tmp-run.0.15.part').touch()
    (tmp_path / 'log').write_text('something else')
    save(tmp_path, 12, manifest=False)
    os.remove(tmp_path / 'run.1.12')
    save(tmp_path, 13, manifest=False)
    damage(tmp_path / 'run.1.13')
    save(tmp_path, 14, manifest=False)
    os.rename(tmp_path / 'run.1.14', tmp_path / 'run.2.14')
    np.savez(tmp_path / 'other.npz', x=np.arange(3))
    save_older(tmp_path / 'older.1.3')
    save_older(tmp_path / 'snapshot_iter_3.0')
    damage(tmp_path / 'snapshot_iter_3.0')
    rows = {row.name: row for row in verify_folder(str(tmp_path))}
    assert list(rows) == ['commit-run.8', 'commit-run.9', 'commit-run.10', 'older.1.3', 'run.0.11',
                          'run.0.12', 'run.0.13', 'run.0.14', 'run.0.8', 'snapshot_iter_3.0',
                          'tmp-run.0.15.part']
    assert str(rows['commit-run.10']) == 'commit-run.10: iteration 10 of 2 ranks: complete'
    assert rows['commit-run.9'].problems == [f'{tmp_path}/run.1.9: is missing']
    assert 'is not a manifest' in str(rows['commit-run.8'])
    assert str(rows['run.0.11']) == (
        'run.0.11: iteration 11 of 2 ranks: complete; resuming writes its manifest')
    assert rows['run.0.12'].problems == ['the file of rank 1 is missing or damaged']
    assert rows['run.0.13'].problems == ['run.1.13: the checksum of x.npy is wrong']
    assert rows['run.0.14'].problems == ['run.2.14: is the file of rank 1']
    assert rows['run.0.8'].problems == [
        'run.0.8: is not in commit-run.8', 'run.1.8: is not in commit-run.8']
    assert str(rows['older.1.3']) == 'older.1.3: complete, a file of an older version'
    assert rows['snapshot_iter_3.0'].problems == ['the checksum of x.npy is wrong']
    assert 'of a process that was killed' in str(rows['tmp-run.0.15.part'])


def test_snapshots_are_found_too(tmp_path):
    save(tmp_path, 3, size=1)
    os.rename(tmp_path / 'commit-run.3', tmp_path / 'commit-snapshot_iter_3')
    row, = verify_folder(str(tmp_path))
    assert (row.name, row.iteration, row.size, row.problems) == (
        'commit-snapshot_iter_3', 3, 1, [])


@pytest.mark.mpi_skip
def test_the_command(tmp_path):
    def run(folder):
        return subprocess.run([sys.executable, '-m', 'chainermn', 'checkpoints', str(folder)],
                              capture_output=True, text=True, timeout=seconds(50))

    assert run(tmp_path).stdout == 'No checkpoint or snapshot found.\n'
    save(tmp_path, 5)
    save(tmp_path, 6, manifest=False)
    done = run(tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(
        'commit-run.5: iteration 5 of 2 ranks: complete\n'
        'run.0.6: iteration 6 of 2 ranks: complete;')
    os.remove(tmp_path / 'run.1.5')
    done = run(tmp_path)
    assert done.returncode == 1 and 'run.1.5: is missing' in done.stdout
    done = run(tmp_path / 'none')
    assert done.returncode == 2 and 'No such file' in done.stderr
