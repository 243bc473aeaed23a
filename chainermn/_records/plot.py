"""Plots two runs: their losses and their relative differences."""
from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from chainermn._records.details import relative
from chainermn._records.read import RecordedRank, RecordedRun
from chainermn._records.settings import NUMBERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS = 2000  # maximum number of updates
#: Okabe and Ito's color-blind safe palette.
_COLORS = '#0072B2', '#D55E00', '#009E73'


def save(a: RecordedRun, b: RecordedRun, path: pathlib.Path) -> None:
    """Write a PNG file; see :func:`draw`."""
    draw(a, b).savefig(path, dpi=110, format='png')


def draw(a: RecordedRun, b: RecordedRun) -> Figure:
    """Draw the losses of the first common rank in two runs, and their relative differences."""
    from matplotlib.figure import Figure

    name = next(name for name in a.ranks if name in b.ranks)
    one, two = a.ranks[name], b.ranks[name]
    n = min(len(one), len(two))
    indices = range(0, n, max(1, n // _POINTS))
    figure = Figure(figsize=(8, 6), layout='constrained')
    above, below = figure.subplots(2, 1, sharex=True)
    for record, label, color in ((one, 'A', _COLORS[0]), (two, 'B', _COLORS[1])):
        above.plot(*_numbers(record, indices, 'loss'), label=f'{label}: {record.path.parent}',
                   color=color, linestyle='-' if label == 'A' else '--')
    above.set(ylabel=f'loss of {name}')
    above.legend()
    for key, color in zip(NUMBERS, _COLORS, strict=True):
        values = [(int(one.row(index)['update']), relative(one.row(index)[key],
                                                           two.row(index)[key]))
                  for index in indices]
        shown = [(number, value) for number, value in values if value]
        below.plot([number for number, _ in shown], [value for _, value in shown], '.-', label=key,
                   color=color)
    below.set(xlabel='update', ylabel='relative difference', yscale='log')
    below.legend()
    return figure


def _numbers(record: RecordedRank, indices: range, key: str) -> tuple[list[int], list[float]]:
    rows = [record.row(index) for index in indices]
    known = [row for row in rows if row[key] != '-']
    return [int(row['update']) for row in known], [float(row[key]) for row in known]
