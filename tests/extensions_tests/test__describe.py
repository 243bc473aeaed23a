"""What stands in a folder, in words."""
import os
import subprocess
import sys

import numpy as np
import pytest
from mpi4py import MPI
from time_limits import seconds

from chainermn.extensions import _snapshot_files
from chainermn.extensions._commit import Commit, File
from chainermn.extensions._describe import describe


def save(folder, iteration, size=2, commit=True):
    files = []
    for rank in range(size):
        path = str(folder / f'run.{rank}.{iteration}')
        tag = _snapshot_files.Tag(f'a-{iteration}', iteration, size, list(range(size)), rank)
        files.append(File.of(path, _snapshot_files.write(path, {'x': np.arange(5)}, tag=tag)))
    if commit:
        Commit(iteration, size, files).write(str(folder / f'commit-run.{iteration}'))


def test_each_save_and_what_is_wrong_with_it(tmp_path):
    assert describe(str(tmp_path)) == []
    for iteration in (10, 9, 8):
        save(tmp_path, iteration)
    save(tmp_path, 11, commit=False)
    os.remove(tmp_path / 'run.1.9')
    (tmp_path / 'commit-run.8').write_text('{}')
    (tmp_path / 'tmp-run.0.12.part').touch()
    (tmp_path / 'log').write_text('something else')
    np.savez(tmp_path / 'other.npz', x=np.arange(3))
    rows = {row.name: row for row in describe(str(tmp_path))}
    assert list(rows) == ['commit-run.8', 'commit-run.9', 'commit-run.10', 'run.0.11', 'run.0.8',
                          'run.1.11', 'run.1.8', 'tmp-run.0.12.part']
    assert str(rows['commit-run.10']) == 'commit-run.10: iteration 10 of 2 ranks: whole'
    assert rows['commit-run.9'].problems == [f'{tmp_path}/run.1.9: is missing']
    assert 'is no commit file' in str(rows['commit-run.8'])
    assert str(rows['run.0.11']) == 'run.0.11: iteration 11 of 2 ranks: no commit file names it'
    assert 'ended while it wrote' in str(rows['tmp-run.0.12.part'])


def test_snapshots_are_found_too(tmp_path):
    save(tmp_path, 3, size=1)
    os.rename(tmp_path / 'commit-run.3', tmp_path / 'commit-snapshot_iter_3')
    row, = describe(str(tmp_path))
    assert (row.name, row.iteration, row.size, row.problems) == (
        'commit-snapshot_iter_3', 3, 1, [])


@pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason='starts processes itself')
def test_the_command(tmp_path):
    def run(folder):
        return subprocess.run([sys.executable, '-m', 'chainermn', 'checkpoints', str(folder)],
                              capture_output=True, text=True, timeout=seconds(50))

    assert run(tmp_path).stdout == 'no checkpoint or snapshot is here\n'
    save(tmp_path, 5)
    save(tmp_path, 6, commit=False)
    done = run(tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(
        'commit-run.5: iteration 5 of 2 ranks: whole\nrun.0.6: ')
    os.remove(tmp_path / 'run.1.5')
    done = run(tmp_path)
    assert done.returncode == 1 and 'run.1.5: is missing' in done.stdout
    done = run(tmp_path / 'none')
    assert done.returncode == 2 and 'No such file' in done.stderr
