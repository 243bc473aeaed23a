"""What all ranks found, in one place; printed with rich where that is installed, else as text."""
from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from chainermn import _streams
from chainermn._check._facts import Found
from chainermn._check._trials import Trial

#: What need not be the same everywhere.
_MAY_DIFFER = 'mpiexec', 'CUDA'


@dataclasses.dataclass
class Report:
    """All that is printed, in plain values."""

    software: dict[str, dict[str, str]]  # by name, then by ranks, such as '0-3'
    hosts: list[dict[str, Any]]
    communicators: list[dict[str, Any]]
    problems: list[str]  # to be mended
    hints: list[str]

    @classmethod
    def of(cls, everybody: Sequence[Found]) -> Report:
        """Puts together what each rank found."""
        report = cls({}, [], [], [], [])
        for name in everybody[0].facts:
            facts = [found.facts[name] for found in everybody]
            values = [fact.value for fact in facts]
            report.software[name] = _by_ranks(values)
            report.problems += dict.fromkeys(fact.problem for fact in facts if fact.problem)
            report.hints += dict.fromkeys(fact.hint for fact in facts if fact.hint)
            if len(set(values)) > 1 and name not in _MAY_DIFFER:
                report.hints.append(f'{name} is not the same on all ranks; install the same '
                                    'everywhere')
        for where, ranks in _by_ranks([found[1:] for found in everybody], key=True).items():
            host, cores, threads, devices = where
            report.hosts.append({'host': host, 'ranks': ranks, 'cores': cores,
                                 'OMP_NUM_THREADS': threads, 'devices': list(devices)})
        if len(everybody) == 1 and not report.problems:
            report.hints.append('this was one process; for several: '
                                'mpiexec -n 4 python -m chainermn check')
        return report

    def add(self, trials: Sequence[Trial]) -> None:
        """Adds how the communicators did."""
        has_devices = all(host['devices'] for host in self.hosts)
        for trial in trials:
            self.communicators.append({
                'name': trial.name, 'works': trial.works, 'why not': trial.said,
                'microseconds': trial.latency and round(trial.latency * 1e6, 1),
                'GB/s': trial.bandwidth and round(trial.bandwidth / 1e9, 2)})
            if not trial.works and (has_devices or not trial.needs_device):
                self.problems.append(f'the communicator {trial.name!r} does not work: {trial.said}')


def _by_ranks(values: Sequence[Any], key: bool = False) -> dict[Any, Any]:
    """The ranks that have each value: ``{'0-3': value}``, or the other way round by ``key``."""
    groups: dict[str, tuple[Any, list[int]]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(repr(value), (value, []))[1].append(rank)
    if key:
        return {(*value[:-1], tuple(value[-1])): _text(ranks) for value, ranks in groups.values()}
    return {_text(ranks): value for value, ranks in groups.values()}


def _text(ranks: Sequence[int]) -> str:
    runs = [list(run) for _, run in itertools.groupby(
        enumerate(ranks), lambda pair: pair[1] - pair[0])]
    return ', '.join(f'{run[0][1]}-{run[-1][1]}' if len(run) > 1 else str(run[0][1])
                     for run in runs)


def print_report(report: Report, svg: str = '') -> None:
    """Prints it for people; with rich also into an SVG file, if there is a name for it."""
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
        show('To be mended', [], [[problem] for problem in report.problems])
    else:
        show('All that is needed works.', [], [])
    if svg and console is not None:
        console.save_svg(svg, title='python -m chainermn check')
    elif svg:
        _streams.write(f'{svg} is not there: that needs rich, pip install rich\n')


def _devices(devices: Sequence[str]) -> str:
    counts = {name: list(devices).count(name) for name in devices}
    return ', '.join(f'{count} x {name}' for name, count in counts.items()) or 'none'


def _speed(one: dict[str, Any]) -> str:
    if not one['works']:
        return str(one['why not'])
    words = []
    if one['microseconds'] is not None:
        words.append(f'latency {one["microseconds"]} us (sum of one number)')
    if one['GB/s'] is not None:
        words.append(f'bandwidth {one["GB/s"]} GB/s (mean of a 16 MiB gradient)')
    return ', '.join(words)


def _show_plain(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(title)
    lines = [*([head] if head else []), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print('  ' + '  '.join(map(str.ljust, line, widths)).rstrip())
    if rows:
        print()


def _console(record: bool) -> Any:
    """What prints with rich, or ``None`` without it."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    # Under mpiexec the output is no terminal, and its width is not known.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120, record=record)


def _show_rich(console: Any, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
               ) -> None:
    from rich.table import Table
    from rich.text import Text

    def colored(cell: str) -> Text:
        return Text(cell, {'works': 'green', 'no': 'yellow'}.get(cell, ''))

    style = {'To be mended': 'bold red', 'All that is needed works.': 'bold green'}
    console.print(Text(title, style.get(title, 'bold')))
    table = Table(show_header=bool(head), box=None, padding=(0, 0, 0, 2))
    for i in range(len(rows[0]) if rows else 0):
        table.add_column(head[i] if head else '', overflow='fold', no_wrap=False)
    for row in rows:
        table.add_row(*map(colored, row))
    if rows:
        console.print(table, '')
