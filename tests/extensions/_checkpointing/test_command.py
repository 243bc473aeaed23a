"""The command verifies a folder and lists all problems."""
import os
import subprocess
import sys

import numpy as np
import pytest
from time_limits import seconds

from chainermn.extensions._checkpointing import rank_file
from chainermn.extensions._checkpointing.command import verify_folder


def save(folder, iteration, size=2, name='run.{rank}.{number}'):
    for rank in range(size):
        path = str(folder / name.format(rank=rank, number=iteration))
        tag = rank_file.Tag(f'a-{iteration}', iteration, size, list(range(size)), rank)
        rank_file.write(path, {'x': np.arange(5)}, tag)


def save_older(path):
    with open(path, 'wb') as file:
        np.savez(file, x=np.arange(100))


def damage(path):
    content = bytearray(path.read_bytes())
    content[content.index(np.arange(5).tobytes())] ^= 1
    path.write_bytes(content)


def test_each_save_and_its_problems(tmp_path):
    assert verify_folder(str(tmp_path)) == []
    for iteration in range(8, 15):
        save(tmp_path, iteration)
    os.remove(tmp_path / 'run.1.9')
    os.remove(tmp_path / 'run.0.11')
    damage(tmp_path / 'run.1.12')
    (tmp_path / 'run.0.13').write_bytes(b'damaged')
    os.rename(tmp_path / 'run.1.14', tmp_path / 'run.2.14')
    (tmp_path / 'run.0.7').write_bytes(b'damaged')
    (tmp_path / 'tmp-run.0.15.part').touch()
    (tmp_path / 'log').write_text('something else')
    (tmp_path / 'folder.0.1').mkdir()
    np.savez(tmp_path / 'other.npz', x=np.arange(3))
    save_older(tmp_path / 'older.1.3')
    save_older(tmp_path / 'older_iter_3.0')
    damage(tmp_path / 'older_iter_3.0')
    rows = {row.name: row for row in verify_folder(str(tmp_path))}
    assert list(rows) == ['run.0.8', 'run.0.9', 'run.0.10', 'run.0.11', 'run.0.12', 'run.0.13',
                          'run.0.14', 'run.2.14', 'older.1.3', 'older_iter_3.0', 'run.0.7',
                          'tmp-run.0.15.part']
    for number in (8, 10):
        assert str(rows[f'run.0.{number}']) == (
            f'run.0.{number}: iteration {number} of 2 ranks: complete')
    assert rows['run.0.9'].problems == [f'{tmp_path}/run.1.9: the file is missing']
    assert rows['run.0.11'].problems == [f'{tmp_path}/run.0.11: the file is missing']
    assert rows['run.0.12'].problems == [f'{tmp_path}/run.1.12: the SHA-256 is wrong']
    assert rows['run.0.13'].problems == [f'{tmp_path}/run.0.13: File is not a zip file']
    assert rows['run.0.14'].problems == [f'{tmp_path}/run.1.14: the file is missing']
    assert rows['run.2.14'].problems == [f'{tmp_path}/run.2.14: the file was renamed']
    assert str(rows['older.1.3']) == 'older.1.3: complete, a file of ChainerMN 7'
    assert rows['older_iter_3.0'].problems == [
        f'{tmp_path}/older_iter_3.0: the checksum of x.npy is wrong']
    assert rows['run.0.7'].problems == [f'{tmp_path}/run.0.7: File is not a zip file']
    assert 'of a process that was killed' in str(rows['tmp-run.0.15.part'])


def test_snapshots_are_found_too(tmp_path):
    save(tmp_path, 3, name='snapshot_iter_{number}.{rank}')
    row, = verify_folder(str(tmp_path))
    assert (row.name, row.iteration, row.size, row.problems) == ('snapshot_iter_3.0', 3, 2, [])
    damage(tmp_path / 'snapshot_iter_3.1')
    row, = verify_folder(str(tmp_path))
    assert row.problems == [f'{tmp_path}/snapshot_iter_3.1: the SHA-256 is wrong']


@pytest.mark.slow
@pytest.mark.mpi_skip
def test_the_command(tmp_path):
    def run(folder):
        return subprocess.run([sys.executable, '-m', 'chainermn', 'checkpoints', str(folder)],
                              capture_output=True, text=True, timeout=seconds(50))

    assert run(tmp_path).stdout == 'No checkpoint or snapshot found.\n'
    save(tmp_path, 5)
    save(tmp_path, 6)
    done = run(tmp_path)
    assert done.returncode == 0 and done.stdout == (
        'run.0.5: iteration 5 of 2 ranks: complete\n'
        'run.0.6: iteration 6 of 2 ranks: complete\n')
    os.remove(tmp_path / 'run.1.5')
    done = run(tmp_path)
    assert done.returncode == 1 and 'run.1.5: the file is missing' in done.stdout
    done = run(tmp_path / 'none')
    assert done.returncode == 2 and 'No such file' in done.stderr
