"""Every benchmark runs with --quick: one short round; the figures are meaningless."""

import ast
import importlib
import itertools
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
import virtual_hosts
from time_limits import seconds

BENCHMARKS = pathlib.Path(__file__).parents[2] / 'benchmarks'
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob('*.py') if path.stem[0] != '_')
#: The others are slow. The first ones start few processes.
MARKS = {**dict.fromkeys(('iterator', 'collectives', 'recent', 'timeline', 'traffic'), ()),
         **dict.fromkeys(('gpu', 'gpu_step', 'gpu_counts'), pytest.mark.gpu)}
NUMBER = re.compile(r'-?[\d,]+(\.\d+)?')
#: Names that tables, legends and titles do not use; outputs and pages do not use the first ones.
RETIRED = re.compile(r'\b(ours|old|raw|gloo)\b')
RETIRED_LABEL = re.compile(rf'{RETIRED.pattern}|\b(goal|now|before|LB)\b|'
                           r'\b(recent|job_traffic|gpu_counts)\b')

pytestmark = pytest.mark.mpi_skip
DOCS = BENCHMARKS.parent / 'docs' / 'benchmarks'


def words_of(picture):
    """The texts in a picture, without numbers."""
    return runpy.run_path(str(DOCS.parent / 'pictures' / 'svg.py'))['labels'](picture)


def check_tables(output):
    """Check the tables of an output, and return them."""
    tables = run_path('_tables.py')['tables'](output)
    assert tables
    assert not RETIRED.search(output)
    for table in tables:
        assert table.rows
        assert len(table.columns) <= 8, table.columns
        for cell in (table.caption, *table.columns, *itertools.chain(*table.rows)):
            assert not RETIRED_LABEL.search(cell), cell
        for cell in itertools.chain(*table.rows):
            assert NUMBER.fullmatch(cell) or not re.match(r'-?\d', cell), cell
    return tables


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.limit(400)
@pytest.mark.parametrize('name', [
    pytest.param(name, marks=MARKS.get(name, pytest.mark.full)) for name in SCRIPTS])
def test_makes_a_section(name, tmp_path):
    if name == 'hosts' and (reason := virtual_hosts.why_not()):
        pytest.skip(reason)
    done = subprocess.run([sys.executable, BENCHMARKS, name, '--quick', '--out', tmp_path,
                           '--docs', tmp_path / 'page.md'],
                          cwd=tmp_path, text=True, capture_output=True,
                          timeout=seconds(380 if name.startswith('gpu') else 110))
    assert done.returncode == 0, done.stdout + done.stderr
    output = (tmp_path / f'{name}.txt').read_text(encoding='utf-8')
    tables = check_tables(output)
    page = (tmp_path / 'page.md').read_text(encoding='utf-8')
    modules = run_path('_tables.py')
    assert f'\n### {modules["SECTIONS"][name].title}\n' in page
    for table in tables:
        assert modules['markdown'](table) in page
    assert f'[output](page/{name}.txt)' in page
    assert (tmp_path / 'page' / f'{name}.txt').read_text(encoding='utf-8') == output
    if (tmp_path / f'{name}.svg').exists():
        drawn = words_of(tmp_path / f'{name}.svg')
        assert drawn
        assert not [words for words in drawn if RETIRED_LABEL.search(words)]
        if (DOCS / f'{name}.svg').exists():
            assert drawn <= words_of(DOCS / f'{name}.svg'), f'run python benchmarks {name}'


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


PAGE = (BENCHMARKS.parent / 'docs' / 'benchmarks.md').read_text(encoding='utf-8')
TABLES = run_path('_tables.py')
TITLES = re.findall('^### (.*)$', PAGE.partition('\n## How this was measured\n')[2], re.MULTILINE)


@pytest.mark.parametrize('title', TITLES)
def test_the_page_shows_the_tables_of_its_outputs(title):
    name = TABLES['NAMES'][title]
    section = PAGE.partition(f'\n### {title}\n')[2].partition('\n##')[0]
    assert f'[Method](../benchmarks/{name}.py) and [output](benchmarks/{name}.txt)' in section
    assert section.startswith(f'\n{TABLES["SECTIONS"][name].question}\n')
    tables = check_tables((DOCS / f'{name}.txt').read_text(encoding='utf-8'))
    shown = ''.join(line for line in section.splitlines(True) if line.startswith('|'))
    assert shown == ''.join(line for table in tables
                            for line in TABLES['markdown'](table).splitlines(True)
                            if line.startswith('|'))
    picture = DOCS / f'{name}.svg'
    assert picture.exists() == (f'](benchmarks/{name}.svg)' in section)
    if picture.exists():
        assert not [words for words in words_of(picture) if RETIRED_LABEL.search(words)]


def test_the_page_uses_one_set_of_names():
    text = re.sub(r'\]\(.*?\)', ']', PAGE)
    assert RETIRED.findall(text) == ['gloo']  # said once
    assert not [title for title in TITLES if RETIRED_LABEL.search(title) or '_' in title]


def test_the_page_begins_with_answers():
    first = PAGE.partition('\nMeasured in one run on ')[0]
    assert first == PAGE[:len(first)] != PAGE
    rows = [len(re.findall(r'^\| (?!---)', part, re.MULTILINE)) for part in first.split('\n###')]
    assert rows == [0, 6, 6, 5]  # with the headings
    assert run_path('_summary.py')['summary'](DOCS, {}).count('| ') == first.count('| ')


def test_the_figures_of_the_front_page():
    text = DOCS.with_name('front.md').read_text(encoding='utf-8')
    steps, = (table for table in TABLES['tables'](
        (DOCS / 'training_step.txt').read_text(encoding='utf-8')) if 'float32' in table.caption)
    longest = max(float(row[-1]) for row in steps.rows if row[1:3] == ['1', '1'])
    assert f'at most {longest - 1:.0%} longer' in ' '.join(text.split())
    value = run_path('_summary.py')['Results'](DOCS).value
    names = 'ChainerMN 8', 'PyTorch'
    pairs = [[value('gpu_step', 'time, ms', f'{name}, {dtype}') for name in names]
             for dtype in ('float32', 'tf32', 'bfloat16')]
    on_gpu = [f'{ours / theirs:.1f}' for ours, theirs in pairs]
    columns = 'ChainerMN 8, ms', 'PyTorch DDP, ms'
    pairs = [[value('mean_grad', column, 'ResNet-50, 102 MB', '2') for column in columns],
             [value('hosts', column, '1', '2', '1', caption='Gradients') for column in columns]]
    shown = re.findall(r'^\| .* \| ([\d.]+) \|$', text, re.MULTILINE)
    assert shown == [*on_gpu, *(f'{ours / theirs:.2f}' for ours, theirs in pairs)]
    page = ' '.join(DOCS.with_name('comparison.md').read_text(encoding='utf-8').split())
    assert ('took {} times as long as in PyTorch with float32, {} times with TF32, and {} times '
            'with bfloat16'.format(*on_gpu)) in page


def test_every_benchmark_has_a_question():
    assert set(TABLES['SECTIONS']) == set(SCRIPTS)
    assert sorted(itertools.chain(*TABLES['GROUPS'].values())) == SCRIPTS
    assert len(TITLES) > 10


def test_tables_are_found_in_an_output(capsys):
    run_path('_rounds.py')['table'](
        ['model', 'time, ms', 'ranks'],
        [['a b', 1234.5, 2], ['c', None, 10], ['d', .0123, None]], 'CPU')
    print('the end')
    output = capsys.readouterr().out
    table, = TABLES['tables'](f'the begin\n{output}')
    assert table == ('CPU', ['model', 'time, ms', 'ranks'],
                     [['a b', '1,230', '2'], ['c', '', '10'], ['d', '0.0123', '']])
    assert (table.value('time, ms', 'a b'), table.value('time, ms', 'c')) == (1230, None)


def test_tables_of_the_page():
    table = TABLES['Table']('4 ranks', ['ranks', 'a, ms', 'b, ms', 'c, ms', 'a / b'],
                            [['2', '1', '2', '', '0.5']])
    assert TABLES['markdown'](table) == (
        '4 ranks, in ms:\n\n| ranks | a | b | a / b |\n| ---: | ---: | ---: | ---: |\n'
        '| 2 | 1 | 2 | 0.5 |\n')
    for unit, text in ('ms', 'Times in ms'), ('steps/s', 'In steps per second'):
        assert TABLES['markdown'](TABLES['Table'](
            '', [f'a, {unit}', f'b, {unit}'], [['1', '2']])).startswith(f'{text}:\n\n| a | b |\n')
    table = table._replace(columns=['ranks', 'a, ms', 'b, MB', 'c', 'a / b'])
    assert '4 ranks:\n\n| ranks | a, ms | b, MB | a / b |\n' in TABLES['markdown'](table)


@pytest.mark.parametrize('has_two', [False, True])
def test_a_picture(has_two, tmp_path):
    rounds = run_path('_rounds.py')
    series = {'ChainerMN 7': {'a row, which has a long name': [3., 40.]},
              'ChainerMN 8': {'a row, which has a long name': [1., 2.]}}
    if not has_two:
        del series['ChainerMN 7']
    rounds['chart'](tmp_path / 'a.svg', 'The title', 'time, ms', series, is_log=True)
    words = words_of(tmp_path / 'a.svg')
    assert words >= {'The title', 'time, ms', 'a row, which has a', 'long name'}
    assert ('ChainerMN #' in words) == has_two  # no legend for one series


@pytest.mark.parametrize('output', [
    'a  b\n-  ---\nx  1 2\n', 'old  b\n---  -\nx    1\n',
    'a  goal\n-  ----\nx  1   \n', '  '.join('abcdefghi') + '\n' + '  '.join('-' * 9) + '\n1\n'])
def test_wrong_tables_are_found(output):
    with pytest.raises(AssertionError):
        check_tables(output)


def test_sections_of_other_runs_state_their_date(tmp_path):
    def dates():
        text = page.read_text(encoding='utf-8')
        head, *sections = re.split('^##+ (?!Summary|How|Startup and)', text, flags=re.MULTILINE)
        return [re.findall(r'^Measured (?:in one run )?on (.*)\.$', part, re.MULTILINE)
                for part in (head, *sections)]

    write_page = run_path('__main__.py')['write_page']
    page = tmp_path / 'page.md'
    for name in ('startup', 'recent'):
        (tmp_path / f'{name}.txt').write_text('\na  b\n-  -\nx  1\n')
    write_page(page, tmp_path, ['startup', 'recent'], [], 'A', True)
    assert dates() == [['A'], [], []]
    write_page(page, tmp_path, ['recent'], [], 'A', False)  # the same day, commit and machine
    assert dates() == [['A'], [], []]
    write_page(page, tmp_path, ['recent'], ['startup exited with status 1'], 'B', False)
    assert dates() == [['A'], [], ['B'], []]
    write_page(page, tmp_path, ['startup'], [], 'C', True)  # so far
    assert dates() == [['C'], [], ['B']]
    write_page(page, tmp_path, ['startup', 'recent'], [], 'C', True)
    assert dates() == [['C'], [], []]
    write_page(page, tmp_path, ['recent'], [], 'D', True)
    assert dates() == [['D'], ['C'], []]
    before = page.read_text()
    (tmp_path / 'page' / 'recent.txt').write_text('\na  b\n-  -\nx  2\n')
    run_path('__main__.py')['format_page'](page)
    assert page.read_text() == before.replace('| x | 1 |', '| x | 2 |', 2).replace(
        '| x | 2 |', '| x | 1 |', 1)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['CNN', 'ResNet-50', 'perceptron', 'DCGAN'])
def test_steps_compute_as_much_as_those_of_pytorch(name, monkeypatch):
    """Floating-point operations in PyTorch's functions, forward and backward."""
    flop_counter = pytest.importorskip('torch.utils.flop_counter')
    monkeypatch.syspath_prepend(BENCHMARKS)
    counts = []
    for module, options in ('_steps_of_chainer', {}), ('_steps_of_torch', {'kind': 'PyTorch'}):
        steps_of = importlib.import_module(module)
        step = steps_of.STEPS[name](steps_of.wrapped(None, False, **options))
        step()  # creates parameters
        with flop_counter.FlopCounterMode(display=False) as counter:
            step()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
