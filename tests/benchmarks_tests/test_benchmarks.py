"""Every benchmark runs with --quick: one short round; the figures are meaningless."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest
from mpi4py import MPI
from time_limits import seconds

BENCHMARKS = pathlib.Path(__file__).parents[2] / 'benchmarks'
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob('*.py') if path.stem[0] != '_')
#: These start few processes, and are tried each time.
SHORT = {'iterator', 'collectives'}
RATIO = re.compile(r'\d\)? times|x old naive +\d|ratios \d|efficiency \d')

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason='starts processes of its own')


@pytest.mark.limit(120)
@pytest.mark.parametrize('name', [
    pytest.param(name, marks=() if name in SHORT else pytest.mark.full) for name in SCRIPTS])
def test_prints_ratios(name, tmp_path):
    done = subprocess.run([sys.executable, BENCHMARKS, name, '--quick', '--out', tmp_path,
                           '--docs', tmp_path / 'page.md'],
                          cwd=tmp_path, timeout=seconds(110), text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert RATIO.search((tmp_path / f'{name}.txt').read_text()), done.stdout
    page = (tmp_path / 'page.md').read_text()
    assert f'\n## {name}\n' in page
    assert (tmp_path / f'{name}.txt').read_text().strip() in page


def test_one_command_runs_all():
    limits = next(node.value for node in ast.parse((BENCHMARKS / '__main__.py').read_text()).body
                  if isinstance(node, ast.Assign) and node.targets[0].id == 'LIMITS')
    assert sorted(ast.literal_eval(limits)) == SCRIPTS


def test_writes_one_section_of_a_page_anew(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('# Benchmarks\n\nWhat.\n\n## startup\n\n1 ms\n\n## recent\n\nof old\n\n'
                    '## overlap\n\n2 ms\n')
    subprocess.run([sys.executable, BENCHMARKS, 'recent', '--quick', '--docs', page],
                   cwd=tmp_path, timeout=seconds(50), check=True, stdout=subprocess.DEVNULL)
    before, _, rest = page.read_text().partition('\n## recent\n')
    assert before == '# Benchmarks\n\nWhat.\n\n## startup\n\n1 ms\n'
    section, _, after = rest.partition('\n## overlap\n')
    assert after == '\n2 ms\n'
    assert 'of old' not in section and 'with sites' in section
    assert re.search(r'Measured on 20..-..-.. at commit \w+, on this machine: .*Python 3',
                     section)


def test_says_what_failed(tmp_path):
    done = subprocess.run([sys.executable, BENCHMARKS, 'mean_grad', '--torch', 'no such Python',
                           '--docs', tmp_path / 'page.md'],
                          cwd=tmp_path, timeout=seconds(50), text=True, capture_output=True)
    assert done.returncode == 1
    assert 'mean_grad exited with status 1' in done.stderr
    assert '- mean_grad exited with status 1' in (tmp_path / 'page.md').read_text()


def test_refuses_an_unknown_name(tmp_path):
    done = subprocess.run([sys.executable, BENCHMARKS, 'collectives', 'unheard_of'],
                          cwd=tmp_path, timeout=seconds(50), text=True, capture_output=True)
    assert done.returncode == 2
    assert 'unknown benchmark: unheard_of' in done.stderr
