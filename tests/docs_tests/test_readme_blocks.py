"""The code blocks of README.md run; ``tox -e docs`` builds the site and runs those of all pages."""

import os
import pathlib
import runpy
import subprocess
import sys

import pytest
from time_limits import seconds

pytestmark = [pytest.mark.mpi_skip, pytest.mark.limit(120)]

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / 'docs' / 'run_blocks.py'
BLOCKS = runpy.run_path(str(SCRIPT))['find_blocks']('README.md')


@pytest.mark.parametrize('ranks', sorted({block.ranks for block in BLOCKS if not block.not_run}))
def test_blocks_run(ranks):
    done = subprocess.run([sys.executable, SCRIPT, 'README.md', '--ranks', str(ranks)], cwd=ROOT,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=seconds(110), env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stdout
