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
#: Pages with blocks that run, by the number of ranks.
PAGES: dict[int, list[str]] = {}
for page in RUN_BLOCKS['all_pages']():
    for ranks in {block.ranks for block in RUN_BLOCKS['find_blocks'](page) if not block.not_run}:
        PAGES.setdefault(ranks, []).append(page)


def test_builds(tmp_path):
    pytest.importorskip('sphinx', reason='needs the extra docs')
    done = subprocess.run(
        [sys.executable, '-m', 'sphinx', '-c', 'docs', '-W', '--keep-going', '-n', '-q',
         '-b', 'html', '-d', tmp_path / 'doctrees', '.', tmp_path / 'html'], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds(110))
    assert done.returncode == 0, done.stdout
    assert (tmp_path / 'html' / 'docs' / 'index.html').exists()


@pytest.mark.parametrize('ranks, pages', [
    *((1, [page]) for page in PAGES[1]),
    *((ranks, pages) for ranks, pages in PAGES.items() if ranks > 1)])
def test_blocks_run(ranks, pages):
    done = subprocess.run([sys.executable, SCRIPT, *pages, '--ranks', str(ranks)], cwd=ROOT,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=seconds(110), env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stdout
