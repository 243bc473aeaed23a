"""The site builds without warnings, and the code blocks of each page run: ``tox -e docs``."""

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
RUN_BLOCKS = runpy.run_path(str(SCRIPT))
PAGES = [page for page in RUN_BLOCKS['all_pages']()
         if not all(block.not_run for block in RUN_BLOCKS['find_blocks'](page))]


def test_builds(tmp_path):
    pytest.importorskip('sphinx', reason='needs the extra docs')
    done = subprocess.run(
        [sys.executable, '-m', 'sphinx', '-c', 'docs', '-W', '--keep-going', '-n', '-q',
         '-b', 'html', '-d', tmp_path / 'doctrees', '.', tmp_path / 'html'], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds(110))
    assert done.returncode == 0, done.stdout
    assert (tmp_path / 'html' / 'docs' / 'index.html').exists()


@pytest.mark.parametrize('page', PAGES)
def test_blocks_run(page):
    done = subprocess.run([sys.executable, SCRIPT, page], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds(110),
                          env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stdout
