"""Print a report, with rich if it is installed, otherwise as plain text."""
from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chainermn._commands.check.results import Report
from chainermn._commands.check.smoke_tests import Result
from chainermn._operations.ranks import ranges
from chainermn._process import streams

if TYPE_CHECKING:
    from rich.console import Console


def print_report(report: Report, svg: str = '') -> None:
    """Print the report as text; with rich, optionally save it as an SVG image.

    Args:
        report: The report.
        svg: Path of the image; an empty string for no image.
    """
    software = []
    for name, groups in report.software.items():
        for i, (info, ranks) in enumerate(groups):
            of_ranks = f'  (ranks {", ".join(ranges(ranks))})' if len(groups) > 1 else ''
            software.append(['' if i else name, info.text + of_ranks])
    hosts = [[host.name, ', '.join(ranges(host.ranks)), str(host.cores), str(host.threads),
              _devices(host.devices)] for host in report.hosts]
    tried = [[result.name, 'works' if result.passed else 'no', _speed(result)]
             for result in report.communicators]
    console = _console(record=bool(svg))
    show = _show_plain if console is None else functools.partial(_show_rich, console)
    show('Software', [], software)
    show('Processes', ['host', 'ranks', 'cores', 'threads per rank', 'devices'], hosts)
    if tried:
        show('Communicators', [], tried)
    for title, findings in (('Hints', report.hints), ('Warnings', report.warnings),
                            ('Problems', report.problems)):
        if findings:
            show(title, [], [[finding.text] for finding in findings])
    if not report.problems:
        show('All required checks passed', [], [])
    if svg and console is not None:
        console.save_svg(svg, title='chainermn check')
    elif svg:
        streams.write(f'chainermn check: {svg} was not written, because --svg requires rich: '
                      'pip install rich\n')


def _devices(devices: Sequence[str]) -> str:
    counts = {name: list(devices).count(name) for name in devices}
    return ', '.join(f'{count} x {name}' for name, count in counts.items()) or 'none'


def _speed(result: Result) -> str:
    if not result.passed:
        return result.error
    parts = []
    if result.latency is not None:
        parts.append(f'latency {result.latency * 1e6:.1f} us (allreduce of one number)')
    if result.bandwidth is not None:
        parts.append(f'bandwidth {result.bandwidth / 1e9:.2f} GB/s (mean of a 16 MiB gradient)')
    return ', '.join(parts)


def _show_plain(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(title)
    lines = [*([head] if head else []), *([*map(streams.printable, row)] for row in rows)]
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
        return Text(streams.printable(cell), {'works': 'green', 'no': 'yellow'}.get(cell, ''))

    style = {'Problems': 'bold red', 'Warnings': 'bold yellow',
             'All required checks passed': 'bold green'}
    console.print(Text(title, style.get(title, 'bold')))
    table = Table(show_header=bool(head), box=None, padding=(0, 0, 0, 2))
    for i in range(len(rows[0]) if rows else 0):
        table.add_column(head[i] if head else '', overflow='fold', no_wrap=False)
    for row in rows:
        table.add_row(*map(colored, row))
    if rows:
        console.print(table, '')
