"""Runs the examples as people do: a script, on some ranks, in a folder of its own."""

import os
import pathlib
import subprocess
import sys

import pytest
from mpi4py import MPI
from time_limits import seconds

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'


@pytest.fixture
def examples():
    """The folder of the examples."""
    return EXAMPLES


@pytest.fixture
def run(tmp_path):
    """A function that runs a script in ``tmp_path`` and returns what it printed."""
    if MPI.COMM_WORLD.size > 1:
        pytest.skip('starts processes of its own')

    def run(script, *options, ranks=2, expected_events=()):
        done = subprocess.run(
            ['mpiexec', '-n', str(ranks), sys.executable, EXAMPLES / script, *options],
            cwd=tmp_path, timeout=seconds(50), text=True, capture_output=True,
            env=os.environ | {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'})
        said = [line for line in done.stderr.splitlines()
                if 'compression slows down communication within a' not in line]
        assert (done.returncode, said) == (0, [f'chainermn: {event}' for event in expected_events])
        return done.stdout

    return run
