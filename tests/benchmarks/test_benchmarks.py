"""Every benchmark runs with --quick: one short round; the figures are meaningless."""

import ast
import importlib
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
import virtual_hosts
from PIL import Image
from time_limits import seconds

BENCHMARKS = pathlib.Path(__file__).parents[2] / 'benchmarks'
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob('*.py') if path.stem[0] != '_')
#: The others are slow.  The first two start few processes.
MARKS = {'iterator': (), 'collectives': (), 'gpu': pytest.mark.gpu,
         'gpu_step': pytest.mark.gpu, 'gpu_counts': pytest.mark.gpu}
RATIO = re.compile(r'\d\)? times|x old naive +\d|ratios \d|efficiency \d|host waits')

pytestmark = pytest.mark.mpi_skip
DOCS = BENCHMARKS.parent / 'docs' / 'benchmarks'


def words_of(png):
    """The texts in a picture, without numbers."""
    texts = Image.open(png).text['Description'].splitlines()
    return {re.sub('[0-9.,]+', '#', text) for text in texts}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.limit(400)
@pytest.mark.parametrize('name', [
    pytest.param(name, marks=MARKS.get(name, pytest.mark.full)) for name in SCRIPTS])
def test_prints_ratios(name, tmp_path):
    if name == 'hosts' and (reason := virtual_hosts.why_not()):
        pytest.skip(reason)
    done = subprocess.run([sys.executable, BENCHMARKS, name, '--quick', '--out', tmp_path,
                           '--docs', tmp_path / 'page.md'],
                          cwd=tmp_path, text=True, capture_output=True,
                          timeout=seconds(380 if name.startswith('gpu') else 110))
    assert done.returncode == 0, done.stdout + done.stderr
    assert RATIO.search((tmp_path / f'{name}.txt').read_text()), done.stdout
    page = (tmp_path / 'page.md').read_text()
    assert f'\n## {name}\n' in page
    assert '\n| --- |' in page
    assert f'[output](page/{name}.txt)' in page
    assert (tmp_path / 'page' / f'{name}.txt').read_text() == (tmp_path / f'{name}.txt').read_text()
    if (tmp_path / f'{name}.png').exists():
        drawn = words_of(tmp_path / f'{name}.png')
        assert drawn and drawn <= words_of(DOCS / f'{name}.png'), f'run python benchmarks {name}'


def test_without_a_gpu(tmp_path):
    env = os.environ | {'CUDA_VISIBLE_DEVICES': ''}
    done = subprocess.run([sys.executable, BENCHMARKS, 'gpu'], cwd=tmp_path, env=env,
                          timeout=seconds(50), text=True, capture_output=True)
    assert done.returncode == 1
    assert re.match(r'benchmarks/gpu.py needs (CuPy|a GPU): .+', done.stderr)


def test_one_command_runs_all():
    limits = next(node.value for node in ast.parse((BENCHMARKS / '__main__.py').read_text()).body
                  if isinstance(node, ast.Assign) and node.targets[0].id == 'LIMITS')
    assert sorted(ast.literal_eval(limits)) == SCRIPTS


@pytest.mark.parametrize('name', SCRIPTS)
def test_imported_names_exist(name):
    """Benchmarks import private names, in functions that only their processes call."""
    for node in ast.walk(ast.parse((BENCHMARKS / f'{name}.py').read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith('chainermn'):
            module = importlib.import_module(node.module)
            for each in node.names:
                if not hasattr(module, each.name):
                    importlib.import_module(f'{node.module}.{each.name}')


def run_path(name):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return runpy.run_path(str(BENCHMARKS / name))
    finally:
        sys.path.remove(str(BENCHMARKS))


PAGE = (BENCHMARKS.parent / 'docs' / 'benchmarks.md').read_text()


@pytest.mark.parametrize('name', re.findall('^## (.*)$', PAGE, re.MULTILINE))
def test_the_page_shows_the_table_of_its_output(name):
    section = PAGE.partition(f'\n## {name}\n')[2].partition('\n## ')[0]
    assert f'[Method](../benchmarks/{name}.py) and [output](benchmarks/{name}.txt)' in section
    output = (BENCHMARKS.parent / 'docs' / 'benchmarks' / f'{name}.txt').read_text().strip('\n')
    tables = run_path('_tables.py')
    table = tables['table'](name, output)
    assert table.count('\n') > 2
    assert section.startswith(f'\n{tables["TABLES"][name].question}\n\n{table}\n')
    assert f'| {tables["TABLES"][name].question} | [{name}](#{name}) |' in PAGE


def test_every_benchmark_has_a_question():
    assert set(run_path('_tables.py')['TABLES']) >= set(SCRIPTS)
    assert PAGE.count('\n## ') > 10
