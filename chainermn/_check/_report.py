"""Combine the results of all ranks, and print them with rich if installed, else as text."""
from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, TypeVar

from chainermn import _streams
from chainermn._check._smoke_tests import Result
from chainermn._check._system_info import ProcessInfo

if TYPE_CHECKING:
    from rich.console import Console

_T = TypeVar('_T')

#: These may differ between ranks.
_MAY_DIFFER = 'mpiexec', 'CUDA'


class Host(TypedDict):
    """A host, as in JSON."""

    host: str
    ranks: str  # such as '0-3'
    cores: int
    OMP_NUM_THREADS: str
    devices: list[str]


#: A communicator, as in JSON.
Tried = TypedDict('Tried', {
    'name': str, 'works': bool, 'error': str, 'microseconds': float | None, 'GB/s': float | None})


@dataclasses.dataclass
class Report:
    """The report in plain values, ready for JSON."""

    software: dict[str, dict[str, str]]  # by name, then by ranks, such as '0-3'
    hosts: list[Host]
    communicators: list[Tried]
    problems: list[str]  # failed required checks
    hints: list[str]

    @classmethod
    def from_ranks(cls, infos: Sequence[ProcessInfo]) -> Report:
        """Combine the information of all ranks.

        Args:
            infos: The information of each rank, by rank.
        """
        report = cls({}, [], [], [], [])
        for name in infos[0].software:
            lines = [info.software[name] for info in infos]
            values = [line.value for line in lines]
            report.software[name] = {_text(ranks): value for value, ranks in _groups(values)}
            report.problems += dict.fromkeys(line.problem for line in lines if line.problem)
            report.hints += dict.fromkeys(line.hint for line in lines if line.hint)
            if len(set(values)) > 1 and name not in _MAY_DIFFER:
                report.hints.append(f'{name} differs between ranks; install the same version on '
                                    'every node')
        for (host, cores, threads, devices), ranks in _groups([info[1:] for info in infos]):
            report.hosts.append({'host': host, 'ranks': _text(ranks), 'cores': cores,
                                 'OMP_NUM_THREADS': threads, 'devices': devices})
        if len(infos) == 1 and not report.problems:
            report.hints.append('to test several processes, run: '
                                'mpiexec -n 4 python -m chainermn check')
        return report

    def add(self, results: Sequence[Result]) -> None:
        """Add the results of the smoke tests.

        Args:
            results: One for each communicator.
        """
        has_devices = all(host['devices'] for host in self.hosts)
        for result in results:
            self.communicators.append({
                'name': result.name, 'works': result.passed, 'error': result.error,
                'microseconds': result.latency and round(result.latency * 1e6, 1),
                'GB/s': result.bandwidth and round(result.bandwidth / 1e9, 2)})
            if not result.passed and (has_devices or not result.needs_gpu):
                self.problems.append(f'the communicator {result.name!r} failed: {result.error}')


def _groups(values: Sequence[_T]) -> list[tuple[_T, list[int]]]:
    """Group ranks by value; values are not always hashable."""
    groups: dict[str, tuple[_T, list[int]]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(repr(value), (value, []))[1].append(rank)
    return list(groups.values())


def _text(ranks: Sequence[int]) -> str:
    runs = [list(run) for _, run in itertools.groupby(
        enumerate(ranks), lambda pair: pair[1] - pair[0])]
    return ', '.join(f'{run[0][1]}-{run[-1][1]}' if len(run) > 1 else str(run[0][1])
                     for run in runs)


def print_report(report: Report, svg: str = '') -> None:
    """Print the report as text; with rich, optionally save it as an SVG image.

    Args:
        report: The report.
        svg: Path of the image; an empty string for none.
    """
    software = [[name if i == 0 else '', value if len(values) == 1 else f'{value}  (ranks {ranks})']
                for name, values in report.software.items()
                for i, (ranks, value) in enumerate(values.items())]
    hosts = [[host['host'], host['ranks'], str(host['cores']), host['OMP_NUM_THREADS'],
              _devices(host['devices'])] for host in report.hosts]
    tried = [[one['name'], 'works' if one['works'] else 'no', _speed(one)]
             for one in report.communicators]
    console = _console(record=bool(svg))
    show = _show_plain if console is None else functools.partial(_show_rich, console)
    show('Software', [], software)
    show('Processes', ['host', 'ranks', 'cores', 'OMP_NUM_THREADS', 'devices'], hosts)
    if tried:
        show('Communicators', [], tried)
    if report.hints:
        show('Hints', [], [[hint] for hint in report.hints])
    if report.problems:
        show('Problems', [], [[problem] for problem in report.problems])
    else:
        show('All required checks passed', [], [])
    if svg and console is not None:
        console.save_svg(svg, title='python -m chainermn check')
    elif svg:
        _streams.write(f'chainermn check: {svg} was not written, as --svg needs rich: '
                       'pip install rich\n')


def _devices(devices: Sequence[str]) -> str:
    counts = {name: list(devices).count(name) for name in devices}
    return ', '.join(f'{count} x {name}' for name, count in counts.items()) or 'none'


def _speed(one: Tried) -> str:
    if not one['works']:
        return one['error']
    parts = []
    if one['microseconds'] is not None:
        parts.append(f'latency {one["microseconds"]} us (allreduce of one number)')
    if one['GB/s'] is not None:
        parts.append(f'bandwidth {one["GB/s"]} GB/s (mean of a 16 MiB gradient)')
    return ', '.join(parts)


def _show_plain(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(title)
    lines = [*([head] if head else []), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print('  ' + '  '.join(map(str.ljust, line, widths)).rstrip())
    if rows:
        print()


def _console(record: bool) -> Console | None:
    """Return rich's console, or ``None`` if rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    # Under mpiexec the output is not a terminal, so its width is unknown.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120, record=record)


def _show_rich(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
               ) -> None:
    from rich.table import Table
    from rich.text import Text

    def colored(cell: str) -> Text:
        return Text(cell, {'works': 'green', 'no': 'yellow'}.get(cell, ''))

    style = {'Problems': 'bold red', 'All required checks passed': 'bold green'}
    console.print(Text(title, style.get(title, 'bold')))
    table = Table(show_header=bool(head), box=None, padding=(0, 0, 0, 2))
    for i in range(len(rows[0]) if rows else 0):
        table.add_column(head[i] if head else '', overflow='fold', no_wrap=False)
    for row in rows:
        table.add_row(*map(colored, row))
    if rows:
        console.print(table, '')
