"""Plots two runs: their losses and their relative differences."""
from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from chainermn._records.details import relative
from chainermn._records.read import RecordedRun
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
    """Draw the losses of the first common rank in two runs, and their relative differences.

    With different numbers of ranks, draw the mean losses of all ranks.
    """
    from matplotlib.figure import Figure

    name = next(name for name in a.ranks if name in b.ranks)
    one, two = a.ranks[name], b.ranks[name]
    n = min(len(one), len(two))
    indices = range(0, n, max(1, n // _POINTS))
    figure = Figure(figsize=(8, 6), layout='constrained')
    above, below = figure.subplots(2, 1, sharex=True)
    is_mean = a.size != b.size

    def values_of(run: RecordedRun, key: str) -> list[str]:
        return [run.mean_loss(name, index) if is_mean and key == 'loss' else
                run.ranks[name].row(index)[key] for index in indices]

    updates = [int(one.row(index)['update']) for index in indices]
    for run, label, color in ((a, 'A', _COLORS[0]), (b, 'B', _COLORS[1])):
        known = [(int(run.ranks[name].row(index)['update']), float(loss)) for index, loss in zip(
            indices, values_of(run, 'loss'), strict=True) if loss != '-']
        above.plot([number for number, _ in known], [loss for _, loss in known],
                   label=f'{label}: {run.folder}', color=color,
                   linestyle='-' if label == 'A' else '--')
    above.set(ylabel='mean loss of all ranks' if is_mean else f'loss of {name}')
    above.legend()
    for key, color in zip(NUMBERS, _COLORS, strict=True):
        values = zip(updates, map(relative, values_of(a, key), values_of(b, key)), strict=True)
        shown = [(number, value) for number, value in values if value]
        below.plot([number for number, _ in shown], [value for _, value in shown], '.-',
                   label='mean loss' if is_mean and key == 'loss' else key, color=color)
    below.set(xlabel='update', ylabel='relative difference', yscale='log')
    below.legend()
    return figure
