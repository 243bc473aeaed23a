"""The table of ``top`` in a terminal, drawn by rich."""
from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chainermn._commands.top import table
from chainermn._commands.top.table import Row


class Display(Live):
    """A table that is replaced by a newer one."""

    def __init__(self) -> None:
        super().__init__(auto_refresh=False)

    def show(self, job: str, rows: Sequence[Row]) -> None:
        """Show a job."""
        shown, more = table.select(rows, self.console.height - 4)
        head, *lines = table.cells(shown)
        drawn = Table(box=None, pad_edge=False, padding=(0, 1))
        for title in head:
            is_text = title in ('host', 'state')
            drawn.add_column(title, justify='left' if is_text else 'right', no_wrap=True,
                             overflow='ellipsis')
        for row, line in zip(shown, lines, strict=True):
            style = 'red' if row.is_silent else 'yellow' if row.note else ''
            drawn.add_row(*(Text(cell) for cell in line), style=style)
        lines = [Text(table.summary(rows, job), 'bold'), drawn, *[Text(more)] * bool(more)]
        self.update(Group(*lines), refresh=True)
