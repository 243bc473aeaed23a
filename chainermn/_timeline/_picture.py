"""Draws a run: where the time of each rank went, and a few steps of all ranks."""
from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from chainermn._timeline import _summary
from chainermn._timeline._read import Rank, Run

#: Of Okabe and Ito: people who are colour-blind can tell them apart.
_COLOURS = {'forward': '#56B4E9', 'backward': '#0072B2', 'update': '#009E73', 'verbs': '#E69F00',
            'waiting': '#D55E00', 'rest': '#DDDDDD'}
_OTHERS = '#CC79A7', '#F0E442', '#000000'

#: Spans that only surround operations; what is left of them is short.
_AROUND = 'exchange', 'broadcast'

_STEPS = 4


def is_possible() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec('matplotlib') is not None


def draw(run: Run, path: pathlib.Path, between: Sequence[float] | None = None) -> None:
    """Draws a PNG.

    Args:
        run: All ranks.
        path: Of the PNG.
        between: The seconds to show of the steps; by default some from the middle.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    begin, end = between or _middle(run)
    colours = _colours(run)
    rows = [(rank, row) for rank in run.ranks for row in sorted({e.row for e in rank.events} | {0})]
    figure = Figure(figsize=(11, 2.4 + .34 * (len(run.ranks) + len(rows))), layout='constrained')
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[len(run.ranks) + 1, len(rows) + 1])
    _draw_shares(above, run, colours)
    for y, (rank, row) in enumerate(rows):
        _draw_row(below, rank, row, y, (begin, end), colours)
    below.set(title=f'from {begin:.3f} s to {end:.3f} s', xlabel='ms',
              xlim=(0, (end - begin) * 1e3),
              yticks=range(len(rows)), ylim=(len(rows) - .5, -.5),
              yticklabels=[f'rank {rank.rank}' if row == 0 else _short(rank.rows.get(row, '?'))
                           for rank, row in rows])
    figure.legend(handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
                  loc='outside right upper')
    figure.savefig(path, dpi=110, format='png')
    os.chmod(path, 0o600)


def _draw_shares(axes: Any, run: Run, colours: dict[str, str]) -> None:
    for y, rank in enumerate(run.ranks):
        shares = _summary.shares(rank)
        parts = {name: seconds for name, seconds in shares.spans.items() if name in colours}
        parts |= {'verbs': shares.working, 'waiting': shares.waiting}
        parts['rest'] = max(0., run.seconds - sum(parts.values()))
        left = 0.
        for name in colours:
            axes.barh(y, parts.get(name, 0.), .8, left, color=colours[name])
            left += parts.get(name, 0.)
    axes.set(title='where the time went', xlabel='s', xlim=(0, run.seconds or 1),
             yticks=range(len(run.ranks)), ylim=(len(run.ranks) - .5, -.5),
             yticklabels=[f'rank {rank.rank}' for rank in run.ranks])


def _draw_row(axes: Any, rank: Rank, row: int, y: int, between: tuple[float, float],
              colours: dict[str, str]) -> None:
    """What is inside of something else is drawn over it."""
    begin, end = between
    layers: dict[str, list[tuple[float, float]]] = {name: [] for name in colours}
    for event in rank.events:
        if event.row == row and event.end > begin and event.begin < end:
            name = event.name
            if event.category:
                name = 'waiting' if _summary.is_waiting(event) else 'verbs'
            if name in layers:
                layers[name].append(((event.begin - begin) * 1e3, event.seconds * 1e3))
    for name in [*(name for name in layers if name not in ('verbs', 'waiting')), 'verbs',
                 'waiting']:
        axes.broken_barh(layers[name], (y - .4, .8), color=colours[name], linewidth=0)


def _colours(run: Run) -> dict[str, str]:
    """A colour for all that there is: for spans of the program's own as far as they reach."""
    spans = dict.fromkeys(name for rank in run.ranks for name in _summary.shares(rank).spans)
    own = [name for name in spans if name not in _COLOURS and name not in _AROUND]
    named = {name: colour for name, colour in _COLOURS.items()
             if name in spans or name in ('verbs', 'waiting', 'rest')}
    return dict(zip(own, _OTHERS, strict=False)) | named


def _middle(run: Run) -> tuple[float, float]:
    """A few steps from the middle of the run; without an optimizer, all of it."""
    ends = [event.end for event in run.ranks[0].events
            if event.name == 'update' and not event.category]
    if len(ends) <= _STEPS:
        return 0., run.seconds or 1.
    first = (len(ends) - _STEPS) // 2
    return ends[first], ends[first + _STEPS]


def _short(name: str) -> str:
    return name.removeprefix('chainermn ')
