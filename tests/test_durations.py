"""The cost of tests: folders that have grown are named, and small changes are not."""

import json

import durations
import pytest
from durations import Cost

pytestmark = pytest.mark.mpi_skip

BUDGET = {'tests/a_tests/test_x.py': {1: Cost(100, 10, 5., 9.), 3: Cost(400)},
          'tests/a_tests/test_y.py': {1: Cost(100, 10, 5., 9.)}}


@pytest.mark.parametrize('ranks, cost, grown', [
    (1, Cost(200, 20), []),
    (1, Cost(210, 25, 1000., 1000.), []),
    (1, Cost(400, 20), ['tests/a_tests at 1 rank: 400 cases, budget 200']),
    (1, Cost(200, 50), ['tests/a_tests at 1 rank: 50 programs, budget 20']),
    (3, Cost(600, 100), ['tests/a_tests at 3 ranks: 600 cases, budget 400',
                         'tests/a_tests at 3 ranks: 100 programs, budget 0']),
    (2, Cost(10, 2), []),
])
def test_folders_that_have_grown_are_named(ranks, cost, grown):
    assert durations.grown({'tests/a_tests/test_x.py': {ranks: cost}}, BUDGET) == grown


def test_new_folders():
    assert durations.grown({'tests/b_tests/test_x.py': {1: Cost(10, 3)}}, BUDGET) == []
    assert durations.grown({'tests/b_tests/test_x.py': {1: Cost(100)}}, BUDGET) == [
        'tests/b_tests at 1 rank: 100 cases, budget 0']


def test_processes_are_summed(tmp_path):
    """Rank 0 counts cases and seconds; the CPU time and programs are those of all ranks."""
    for name, costs in {'0': [1, 1, 2., 3.], '1': [0, 2, 0., 4.]}.items():
        line = json.dumps(['tests/test_x.py::test[1]', *costs])
        (tmp_path / f'{durations.PREFIX}{name}').write_text(f'{line}\n')
    (tmp_path / '0').write_text('another file')
    assert durations.recorded(str(tmp_path)) == {'tests/test_x.py::test[1]': Cost(1, 3, 2., 7.)}


def test_files(tmp_path):
    runs = {1: {'tests/test_x.py::test_a': Cost(1, 2, 3., 4.)},
            3: {'tests/test_x.py::test_a': Cost(1, 0, 1., 2.),
                'tests/test_x.py::test_b': Cost(1, 0, 1., 2.)}}
    durations.write_tests(runs, tmp_path / 'tests')
    assert durations.read_tests(tmp_path / 'tests') == runs
    files = durations.by_file(runs)
    durations.write(files, tmp_path / 'files')
    assert durations.read(tmp_path / 'files') == files == {
        'tests/test_x.py': {1: Cost(1, 2, 3., 4.), 3: Cost(2, 0, 2., 4.)}}
    assert '| `tests` | 3 | 2 | 5 | 8 |\n| 1 rank | 1 | 2 | 3 | 4 |' in durations.table(files)


def test_the_budget_and_its_table_belong_together():
    files = durations.read()
    assert durations.table(files) in durations.CONTRIBUTING.read_text(encoding='utf-8')
    assert durations.grown(files, files) == []
