"""The MNIST example, as people run it."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from time_limits import seconds

pytestmark = [
    pytest.mark.mpi_skip,
    pytest.mark.limit(180),
]

SCRIPT = pathlib.Path(__file__).parents[2] / 'examples' / 'mnist' / 'train_mnist.py'


def train(ranks, cwd, *options):
    """Run the example; give what it printed."""
    done = subprocess.run(
        ['mpiexec', '-n', str(ranks), sys.executable, SCRIPT, *options],
        cwd=cwd, timeout=seconds(90), text=True, capture_output=True,
        env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert (done.returncode, done.stderr) == (0, '')
    return done.stdout


def log_of(folder):
    return json.loads((folder / 'log').read_text())


@pytest.mark.full  # test__demo.py trains this model for fewer epochs
def test_learns_the_digits_on_two_processes(tmp_path):
    output = train(2, tmp_path)
    *_, last = output.splitlines()
    accuracy = re.fullmatch(r'Validation accuracy: ([\d.]+)%', last)
    assert float(accuracy[1]) >= 95

    assert output.count('2 processes, FlatCommunicator') == 1  # rank 0 alone talks
    result = tmp_path / 'result'
    for plot in 'loss.png', 'accuracy.png':
        assert (result / plot).read_bytes().startswith(b'\x89PNG')
    epochs = log_of(result)
    assert [epoch['epoch'] for epoch in epochs] == [*range(1, 21)]
    logged = epochs[-1]['validation/main/accuracy']
    assert logged * 100 == pytest.approx(float(accuracy[1]), abs=0.01)


@pytest.mark.full
def test_continues_from_a_snapshot(tmp_path):
    train(2, tmp_path, '--epoch', '2', '--out', 'out', '--communicator', 'naive')
    first = log_of(tmp_path / 'out')
    snapshot, = (tmp_path / 'out').glob('snapshot_iter_*')
    train(2, tmp_path, '--epoch', '3', '--out', 'again', '--communicator', 'naive',
          '--resume', snapshot)
    again = log_of(tmp_path / 'again')
    assert again[:2] == first
    assert len(again) == 3
    assert again[2]['iteration'] > again[1]['iteration'] > 0
    assert again[2]['main/loss'] < again[1]['main/loss']
