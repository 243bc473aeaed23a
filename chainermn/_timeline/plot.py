"""Plots a run: the time of each rank by activity, and a few steps of all ranks."""
from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chainermn._timeline import summary
from chainermn._timeline.trace_files import RankTrace, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's color-blind safe palette.
_COLORS = {'forward': '#56B4E9', 'backward': '#0072B2', 'update': '#009E73',
           'communication': '#E69F00', 'waiting': '#D55E00', 'other': '#DDDDDD'}
_MORE_COLORS = '#CC79A7', '#F0E442', '#000000'

#: Spans that only wrap operations and take little time themselves.
_WRAPPERS = 'exchange', 'broadcast'

_STEPS = 4


def is_available() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec('matplotlib') is not None


def save(run: Run, path: pathlib.Path, between: Sequence[float] | None = None) -> None:
    """Write a PNG file that only its owner can read; see :func:`draw`."""
    figure = draw(run, between)
    figure.savefig(path, dpi=110, format='png')
    os.chmod(path, 0o600)


def draw(run: Run, between: Sequence[float] | None = None) -> Figure:
    """Draw a run.

    Args:
        run: The run to plot.
        between: The start and the end of the interval to show, in seconds; by default, a few steps
            in the middle of the run.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    begin, end = between or _middle(run)
    colors = _colors(run)
    rows = [(rank, row) for rank in run.ranks for row in sorted({e.row for e in rank.events} | {0})]
    figure = Figure(figsize=(11, 2.4 + .34 * (len(run.ranks) + len(rows))), layout='constrained')
    above, below = figure.subplots(2, 1, height_ratios=[len(run.ranks) + 1, len(rows) + 1])
    _draw_shares(above, run, colors)
    for y, (rank, row) in enumerate(rows):
        _draw_row(below, rank, row, y, (begin, end), colors)
    below.set(title=f'from {begin:.3f} s to {end:.3f} s', xlabel='ms',
              xlim=(0, (end - begin) * 1e3),
              yticks=range(len(rows)), ylim=(len(rows) - .5, -.5),
              yticklabels=[f'rank {rank.rank}' if row == 0
                           else rank.rows.get(row, '?').removeprefix('chainermn ')
                           for rank, row in rows])
    figure.legend(handles=[Patch(color=color, label=name) for name, color in colors.items()],
                  loc='outside right upper')
    return figure


def _draw_shares(axes: Axes, run: Run, colors: dict[str, str]) -> None:
    for y, rank in enumerate(run.ranks):
        shares = summary.shares(rank)
        parts = {name: seconds for name, seconds in shares.spans.items() if name in colors}
        parts |= {'communication': shares.communicating, 'waiting': shares.waiting}
        parts['other'] = max(0., run.seconds - sum(parts.values()))
        left = 0.
        for name in colors:
            axes.barh(y, parts.get(name, 0.), .8, left, color=colors[name])
            left += parts.get(name, 0.)
    axes.set(title='time per rank', xlabel='s', xlim=(0, run.seconds or 1),
             yticks=range(len(run.ranks)), ylim=(len(run.ranks) - .5, -.5),
             yticklabels=[f'rank {rank.rank}' for rank in run.ranks])


def _draw_row(axes: Axes, rank: RankTrace, row: int, y: int, between: tuple[float, float],
              colors: dict[str, str]) -> None:
    """Draw one thread of a rank; operations are drawn on top of the spans that contain them."""
    begin, end = between
    layers: dict[str, list[tuple[float, float]]] = {name: [] for name in colors}
    for event in rank.events:
        if event.row == row and event.end > begin and event.begin < end:
            name = event.name
            if event.category:
                name = 'waiting' if summary.is_waiting(event) else 'communication'
            if name in layers:
                layers[name].append(((event.begin - begin) * 1e3, event.seconds * 1e3))
    on_top = ['communication', 'waiting']
    for name in [*(name for name in layers if name not in on_top), *on_top]:
        axes.broken_barh(layers[name], (y - .4, .8), color=colors[name], linewidth=0)


def _colors(run: Run) -> dict[str, str]:
    """Assign colors to activities. Custom spans get colors as long as some are left."""
    spans = dict.fromkeys(name for rank in run.ranks for name in summary.shares(rank).spans)
    custom = [name for name in spans if name not in _COLORS and name not in _WRAPPERS]
    named = {name: color for name, color in _COLORS.items()
             if name in spans or name in ('communication', 'waiting', 'other')}
    return dict(zip(custom, _MORE_COLORS, strict=False)) | named


def _middle(run: Run) -> tuple[float, float]:
    """Return the interval of a few steps in the middle; without an optimizer, the whole run."""
    ends = [event.end for event in run.ranks[0].events
            if event.name == 'update' and not event.category]
    if len(ends) <= _STEPS:
        return 0., run.seconds or 1.
    first = (len(ends) - _STEPS) // 2
    return ends[first], ends[first + _STEPS]
