"""Measures the cost of the tests: cases, started programs, seconds and CPU seconds.

``run_ranks.py`` measures each run, and fails if a folder has many more cases or starts many more
programs than tests/durations.json allows. Seconds depend on the machine, so they have no limit.
These commands measure all tests, and update that file and the table of CONTRIBUTING.md:

    python tests/run_ranks.py --measure /tmp/tests.json
    python tests/durations.py /tmp/tests.json

To see what a file spends its time on: ``python tests/durations.py /tmp/tests.json --show FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Generator, Iterable
from typing import NamedTuple

import pytest

FILE = pathlib.Path(__file__).with_suffix('.json')
CONTRIBUTING = FILE.parents[1] / 'CONTRIBUTING.md'
TABLE = '<!-- durations -->', '<!-- end of durations -->'
PREFIX = 'durations-'  # prefix of the files that the processes of a run write

# A folder may have this many times the cases and programs of its budget, and a few more.
FACTOR = 1.25
SPARE_CASES = 40
SPARE_PROGRAMS = 8


class Cost(NamedTuple):
    """The cost of tests at one number of ranks; CPU seconds include programs that have ended."""

    cases: int = 0
    programs: int = 0
    seconds: float = 0.
    cpu: float = 0.

    def plus(self, other: Cost) -> Cost:
        return Cost(self.cases + other.cases, self.programs + other.programs,
                    self.seconds + other.seconds, self.cpu + other.cpu)


Costs = dict[str, dict[int, Cost]]  # file or folder, number of ranks
Runs = dict[int, dict[str, Cost]]  # number of ranks, test


class Recorder:
    """Writes the cost of each test that this process runs to a file in a folder."""

    def __init__(self, folder: str, name: str, is_first: bool) -> None:
        path = pathlib.Path(folder, f'{PREFIX}{name}')
        self.file = path.open('w', buffering=1)
        self.is_first = is_first  # all ranks run the same tests at the same time
        self.programs = 0
        sys.addaudithook(self.count)

    def count(self, event: str, args: object) -> None:
        if event == 'subprocess.Popen':
            self.programs += 1

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        programs, start, cpu = self.programs, time.monotonic(), cpu_seconds()
        result = yield
        seconds = time.monotonic() - start if self.is_first else 0.
        cost = Cost(int(self.is_first), self.programs - programs, round(seconds, 4),
                    round(cpu_seconds() - cpu, 4))
        self.file.write(f'{json.dumps([item.nodeid, *cost])}\n')
        return result

    def pytest_unconfigure(self) -> None:
        self.file.close()


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the processes that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def recorded(folder: str) -> dict[str, Cost]:
    """Return the cost of each test, over all processes that wrote to a folder."""
    tests: dict[str, Cost] = {}
    for path in pathlib.Path(folder).glob(f'{PREFIX}*'):
        for test, *cost in map(json.loads, path.read_text().splitlines()):
            tests[test] = tests.get(test, Cost()).plus(Cost(*cost))
    return tests


def write_tests(runs: Runs, path: pathlib.Path) -> None:
    """Write one line for each test at each number of ranks."""
    lines = (json.dumps([ranks, test, *cost]) for ranks, tests in runs.items()
             for test, cost in tests.items())
    path.write_text('\n'.join([*lines, '']))


def read_tests(path: pathlib.Path) -> Runs:
    runs: Runs = {}
    for line in path.read_text().splitlines():
        ranks, test, *cost = json.loads(line)
        runs.setdefault(ranks, {})[test] = Cost(*cost)
    return runs


def by_file(runs: Runs) -> Costs:
    """Return the sums over the tests of each file."""
    files: Costs = {}
    for ranks, tests in runs.items():
        for test, cost in tests.items():
            file = files.setdefault(test.partition('::')[0], {})
            file[ranks] = file.get(ranks, Cost()).plus(cost)
    return files


def by_folder(files: Costs) -> Costs:
    """Return the sums over the files of each folder."""
    folders: Costs = {}
    for file, costs in files.items():
        folder = folders.setdefault('/'.join(os.path.dirname(file).split('/')[:2]), {})
        for ranks, cost in costs.items():
            folder[ranks] = folder.get(ranks, Cost()).plus(cost)
    return folders


def grown(files: Costs, budget: Costs) -> list[str]:
    """Return a line for each folder with many more cases or programs than its budget."""
    lines = []
    budgets = by_folder(budget)
    for folder, costs in sorted(by_folder(files).items()):
        for ranks, cost in costs.items():
            allowed = budgets.get(folder, {}).get(ranks, Cost())
            for name, spare in (('cases', SPARE_CASES), ('programs', SPARE_PROGRAMS)):
                found, limit = getattr(cost, name), getattr(allowed, name)
                if found > FACTOR * limit + spare:
                    lines.append(f'{folder} at {ranks} rank{"s" * (ranks > 1)}: '
                                 f'{found} {name}, budget {limit}')
    return lines


def read(path: pathlib.Path = FILE) -> Costs:
    return {file: {int(ranks): Cost(*cost) for ranks, cost in costs.items()}
            for file, costs in json.loads(path.read_text()).items()}


def write(files: Costs, path: pathlib.Path = FILE) -> None:
    """Write one line for each file."""
    lines = (f'{json.dumps(file)}: {json.dumps(dict(sorted(costs.items())))}'
             for file, costs in sorted(_rounded(files).items()))
    path.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


def _rounded(files: Costs) -> Costs:
    return {file: {ranks: cost._replace(seconds=round(cost.seconds, 1), cpu=round(cost.cpu, 1))
                   for ranks, cost in costs.items()} for file, costs in files.items()}


def table(files: Costs) -> str:
    """Return the table of CONTRIBUTING.md."""
    lines = ['| folder | cases | programs | seconds | CPU seconds |', '|---|---|---|---|---|']
    for folder, costs in sorted(by_folder(files).items()):
        lines.append(_row(f'`{folder}`', costs.values()))
    sizes = sorted({ranks for costs in files.values() for ranks in costs})
    for ranks in sizes:
        lines.append(_row(f'{ranks} rank{"s" * (ranks > 1)}', (
            costs[ranks] for costs in files.values() if ranks in costs)))
    return '\n'.join(lines)


def _row(name: str, costs: Iterable[Cost]) -> str:
    total = Cost()
    for cost in costs:
        total = total.plus(cost)
    return (f'| {name} | {total.cases} | {total.programs} | {total.seconds:.0f} | {total.cpu:.0f} '
            '|')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('file', type=pathlib.Path, help='written by run_ranks.py --measure')
    parser.add_argument('--show', metavar='TEXT',
                        help='only list the tests whose names contain this, by CPU time')
    args = parser.parse_args()
    runs = read_tests(args.file)
    if args.show is not None:
        found = [(cost, ranks, test) for ranks, tests in runs.items()
                 for test, cost in tests.items() if args.show in test]
        for cost, ranks, test in sorted(found, key=lambda each: -each[0].cpu):
            print(f'{cost.cpu:7.2f} CPU {cost.seconds:7.2f} s {cost.programs:3} programs '
                  f'{ranks} ranks {test}')
        return
    write(by_file(runs))
    files = read()  # rounded
    text = CONTRIBUTING.read_text(encoding='utf-8')
    start, end = text.index(TABLE[0]), text.index(TABLE[1])
    CONTRIBUTING.write_text(f'{text[:start]}{TABLE[0]}\n{table(files)}\n{text[end:]}',
                            encoding='utf-8')


if __name__ == '__main__':
    main()
