"""chainermn demo trains a digit classifier, in any working directory."""

import errno
import os
import re
import subprocess
import sys

import pytest
from time_limits import seconds

pytestmark = pytest.mark.mpi_skip


@pytest.mark.slow
def test_demo_trains(tmp_path):
    clean = {name: value for name, value in os.environ.items() if name != 'OMP_NUM_THREADS'}
    done = subprocess.run(
        [sys.executable, '-m', 'chainermn', 'demo', '-n', '2', '--epoch', '6', '--out', 'here'],
        cwd=tmp_path, env=clean, text=True, capture_output=True, timeout=seconds(50))
    assert (done.returncode, done.stderr) == (0, '')
    first, last = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert first.startswith('2 processes, FlatCommunicator')
    assert float(re.fullmatch(r'Validation accuracy: ([\d.]+)%', last)[1]) >= 90
    assert [path.name for path in tmp_path.iterdir()] == ['here']
    assert 'examples/sec' not in done.stdout  # no frames of the progress bar
    assert (tmp_path / 'here' / 'log').exists()


def test_without_scikit_learn(usage_error, monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    assert (f'the demo needs scikit-learn. Install it: {sys.executable} -m pip install '
            'scikit-learn') in usage_error('demo')


def test_without_mpiexec(usage_error, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'python'))
    monkeypatch.setenv('PATH', str(tmp_path))
    assert 'mpiexec not found' in usage_error('demo')


@pytest.mark.parametrize('option', ['-n', '--epoch'])
def test_wrong_number(option, usage_error):
    assert '-n and --epoch must be positive integers' in usage_error('demo', option, 0)


def test_out_is_a_file(usage_error, tmp_path):
    (tmp_path / 'file').touch()
    error = usage_error('demo', '--out', tmp_path / 'file')
    assert f"File exists: '{tmp_path}/file'" in error
    assert 'Select another folder with --out FOLDER' in error


@pytest.mark.parametrize('is_there', [False, True])
def test_read_only_folder(usage_error, tmp_path, monkeypatch, is_there):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, 'Read-only file system', 'result')

    # As root may write everywhere, a file system cannot play this.
    monkeypatch.chdir(tmp_path)
    if is_there:
        (tmp_path / 'result').mkdir()
        monkeypatch.setattr('tempfile.TemporaryFile', refuse)
    else:
        monkeypatch.setattr('os.makedirs', refuse)
    error = usage_error('demo')
    assert "Read-only file system: 'result'" in error
    assert 'Select another folder with --out FOLDER' in error
