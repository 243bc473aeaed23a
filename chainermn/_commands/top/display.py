"""Show the ranks: with rich in a terminal, otherwise as lines of text."""
from __future__ import annotations

import signal
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from chainermn._commands.top.table import TableRow
from chainermn._operations.ranks import group_lines
from chainermn._timeline.activities import NAMES

if TYPE_CHECKING:
    from rich.console import Console, Group

_HEAD = ['rank', 'host', 'updates', 'per s', *NAMES, 'CPU', 'RSS', 'GPU', 'VRAM']


def show(job: str, tables: Iterable[Sequence[TableRow]]) -> None:
    """Show each table; in a terminal it replaces the previous one, and the last one remains.

    Args:
        job: The name of the job.
        tables: The tables to show, one per refresh.
    """
    console = _console()
    if console is None:
        for rows in tables:
            print('\n'.join(lines(job, rows)), flush=True)
        return
    from rich.live import Live

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    live = Live(console=console, screen=True, auto_refresh=False)
    try:
        with live:
            for rows in tables:
                live.update(view(job, rows), refresh=True)
    finally:
        console.print(live.get_renderable())


def _console() -> Console | None:
    """Return rich's console; ``None`` without rich or if the output cannot be updated in place."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(highlight=False)
    return None if console.is_dumb_terminal else console


def lines(job: str, rows: Sequence[TableRow]) -> list[str]:
    """Return a summary and a table, whose last column is the state of each rank."""
    cells = [_HEAD, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [summary(job, rows)] + [
        '  '.join([*map(str.rjust, each, widths), note]).rstrip()
        for each, note in zip(cells, ['state', *(row.note for row in rows)], strict=True)]


def view(job: str, rows: Sequence[TableRow]) -> Group:
    """Return a summary, the states of the ranks, and a table.

    The states come first, so that a short terminal cuts off the table instead.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    cells = [*map(_cells, rows)]
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)
    for name, *column in zip(_HEAD, *cells, strict=True):
        width = max(map(len, column))  # a narrow terminal shortens only names that are longer
        table.add_column(name, justify='right', overflow='ellipsis', min_width=width,
                         no_wrap=len(name) <= width)
    for row, each in zip(rows, cells, strict=True):
        table.add_row(*each, style='red' if row.is_silent else 'yellow' if row.note else '')
    notes = group_lines((row.rank, row.note) for row in rows if row.note)
    return Group(Text(summary(job, rows), 'bold'), *map(Text, notes), table)


def summary(job: str, rows: Sequence[TableRow]) -> str:
    """Return the line above the table."""
    rates = [row.updates_per_second for row in rows if row.updates_per_second is not None]
    hosts = {row.host for row in rows if row.host}
    parts = [f'{job}: {len(rows)} rank{"s" * (len(rows) > 1)} on {len(hosts)} '
             f'host{"s" * (len(hosts) > 1)}']
    if rates:
        parts.append(f'{statistics.median(rates):.2f} updates per second')
    if silent := sum(row.is_silent for row in rows):
        parts.append(f'{silent} rank{"s" * (silent > 1)} not responding')
    elif len(rows) > 1 and all(row.is_waiting for row in rows):
        parts.append('all ranks are waiting: a deadlock?')
    return ', '.join(parts)


def _cells(row: TableRow) -> list[str]:
    """Return the cells of a rank, in the order of the head."""
    shares = [_share(None if row.shares is None else row.shares[name]) for name in NAMES]
    gpu_bytes = row.gpu_bytes or None if row.gpu_used_bytes is None else row.gpu_used_bytes
    return [str(row.rank), row.host or '', _number(row.updates), _number(row.updates_per_second),
            *shares, _share(row.cpu_cores), _size(row.rss_bytes), _share(row.gpu_utilization),
            _size(gpu_bytes)]


def _share(number: float | None) -> str:
    return '-' if number is None else f'{number:.0%}'


def _number(number: float | None) -> str:
    if number is None:
        return '-'
    return str(number) if isinstance(number, int) else f'{number:.2f}'


def _size(nbytes: int | None) -> str:
    return '-' if nbytes is None else f'{nbytes / 2**30:.2f} GiB'
