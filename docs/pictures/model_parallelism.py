"""Generates the diagrams of docs/model_parallelism.md.

Run ``python docs/pictures/model_parallelism.py`` after a change. A diagram is a list of shapes.
"""

from __future__ import annotations

import html
import pathlib

from chainermn.links._pipeline.schedule import clock_cycles
from chainermn.links._pipeline.stages import ListedLink, connect

FOLDER = pathlib.Path(__file__).resolve().parent

BLUE, GREEN, GRAY = '#dbe9f6', '#dff0d8', '#f3f3f3'
HEAD = ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}" '
        'font-family="sans-serif" font-size="13" fill="#123">\n<defs>'
        '<marker id="forward" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#245"/></marker>'
        '<marker id="backward" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#b40"/></marker></defs>\n'
        '<rect width="{0}" height="{1}" fill="white"/>')


def box(x: int, y: int, width: int, height: int, label: str, fill: str = BLUE) -> str:
    """Return a box for a stage of a model."""
    return (f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" '
            f'stroke="#345"/>\n' + text(x + width // 2, y + height // 2 + 5, label))


def rank_box(x: int, y: int, width: int, height: int, label: str) -> str:
    """Return a box for a rank, which contains stages."""
    return (f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{GRAY}" '
            f'stroke="#999" stroke-dasharray="5 4"/>\n' + text(x + 10, y + 20, label, 'start'))


def text(x: int, y: int, label: str, anchor: str = 'middle', fill: str = '#123') -> str:
    """Return a label."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}">{html.escape(label)}</text>'


def arrow(x1: int, y1: int, x2: int, y2: int, backward: bool = False) -> str:
    """Return an arrow for an activation or, with ``backward``, for a gradient."""
    color, name, dashes = ('#b40', 'backward', ' stroke-dasharray="6 4"') if backward else (
        '#245', 'forward', '')
    return (f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="1.8"'
            f'{dashes} marker-end="url(#{name})"/>')


LEGEND = [arrow(20, 0, 60, 0), text(68, 5, 'forward', 'start'),
          arrow(130, 0, 170, 0, backward=True), text(178, 5, 'backward', 'start', '#b40')]


def legend(y: int) -> str:
    """Return the legend of the arrows."""
    return f'<g transform="translate(0 {y})">' + '\n'.join(LEGEND) + '</g>'


def chain_list() -> tuple[int, int, list[str]]:
    """Draw three stages on two ranks."""
    return 640, 250, [
        rank_box(20, 15, 600, 85, 'rank 0'), rank_box(20, 125, 600, 85, 'rank 1'),
        box(120, 35, 110, 45, 'First'), box(420, 35, 110, 45, 'Last'),
        box(270, 145, 110, 45, 'Middle'),
        text(60, 62, 'x'), arrow(72, 57, 118, 57), arrow(532, 57, 578, 57), text(592, 62, 'y'),
        arrow(195, 82, 280, 143), arrow(360, 143, 445, 82),
        arrow(262, 152, 160, 84, backward=True), arrow(490, 84, 388, 152, backward=True),
        text(245, 108, 'rank_out=1', 'start'), text(400, 108, 'rank_in=1', 'end'), legend(230)]


def pseudo_connect() -> tuple[int, int, list[str]]:
    """Draw a graph that ``send`` cuts, and how ``pseudo_connect`` connects it."""
    return 640, 250, [
        rank_box(20, 15, 600, 85, 'rank 0'), rank_box(20, 125, 600, 85, 'rank 1'),
        box(90, 35, 70, 45, 'f(x)'), box(195, 35, 70, 45, 'send', GREEN),
        box(415, 35, 70, 45, 'recv', GREEN), box(520, 35, 70, 45, 'loss'),
        box(235, 145, 70, 45, 'recv', GREEN), box(320, 145, 70, 45, 'g(h)'),
        box(405, 145, 70, 45, 'send', GREEN),
        arrow(162, 57, 193, 57), arrow(487, 57, 518, 57),
        arrow(307, 167, 318, 167), arrow(392, 167, 403, 167),
        arrow(235, 82, 262, 143), arrow(435, 143, 445, 82),
        arrow(413, 57, 267, 57, backward=True),
        text(340, 50, 'the delegate variable', fill='#b40'), legend(230)]


def channels() -> tuple[int, int, list[str]]:
    """Draw layers of which each rank has some channels."""
    shapes = []
    for rank in range(2):
        y = 15 + 105 * rank
        shapes += [rank_box(20, y, 640, 90, f'rank {rank}'),
                   box(80, y + 28, 100, 42, f'filters {"AB"[rank]}'),
                   box(270, y + 28, 100, 42, 'all channels', GREEN),
                   box(430, y + 28, 100, 42, f'filters {"CD"[rank]}'),
                   text(46, y + 54, 'x'), arrow(54, y + 49, 78, y + 49),
                   arrow(182, y + 49, 268, y + 49), arrow(372, y + 49, 428, y + 49),
                   arrow(532, y + 49, 600, y + 49), text(620, y + 54, '...')]
    return 680, 220, [*shapes, arrow(182, 75, 268, 145), arrow(182, 160, 268, 82),
                      text(320, 117, 'allgather, concat')]


def grid() -> tuple[int, int, list[str]]:
    """Draw two models with two stages each, on four ranks."""
    shapes = [rank_box(110, 40, 470, 80, ''), rank_box(110, 150, 470, 80, '')]
    for rank in range(4):
        model, stage = divmod(rank, 2)
        shapes.append(box(150 + 230 * stage, 58 + 110 * model, 160, 44,
                          f'rank {rank}: stage {stage}'))
    shapes += [text(60, 85, 'model 0'), text(60, 195, 'model 1'),
               text(345, 30, 'model_comm: activations, within a row')]
    for y in (80, 190):
        shapes += [arrow(312, y - 6, 378, y - 6), arrow(378, y + 8, 312, y + 8, backward=True)]
    for x in (230, 460):
        shapes += [arrow(x, 135, x, 104), arrow(x, 135, x, 166)]
    return 640, 270, [*shapes, text(345, 131, 'data_comm: mean of'),
                      text(345, 146, 'the gradients, within a column'),
                      legend(252)]


def pipeline() -> tuple[int, int, list[str]]:
    """Draw the steps of four ranks, in both schedules."""
    parts = [[ListedLink('', [rank - 1] if rank else None, [rank + 1] if rank < 3 else None)]
             for rank in range(4)]
    shapes, width, height = [], 26, 24
    for n, name in enumerate(('gpipe', '1f1b')):
        top = 40 + 150 * n
        shapes.append(text(20, top - 12, f"schedule='{name}'", 'start'))
        for rank in range(4):
            shapes.append(text(20, top + height * rank + 17, f'rank {rank}', 'start'))
        for tick, cycle in enumerate(clock_cycles(connect(parts), 6, name)):
            shapes += [box(75 + width * tick, top + height * rank, width, height,
                           str(step.micro_batch), BLUE if step.is_forward else GREEN)
                       for rank, step in cycle.items()]
    return 640, 330, [
        *shapes, box(75, 298, width, height, '0', BLUE), text(110, 315, 'forward', 'start'),
        box(190, 298, width, height, '0', GREEN),
        text(225, 315, 'backward of micro-batch 0', 'start')]


def draw() -> dict[str, str]:
    """Return the pictures by file name."""
    return {f'{picture.__name__}.svg': '\n'.join([HEAD.format(width, height), *shapes, '</svg>\n'])
            for picture in (chain_list, pseudo_connect, channels, grid, pipeline)
            for width, height, shapes in [picture()]}


if __name__ == '__main__':
    for name, drawn in draw().items():
        (FOLDER / name).write_text(drawn, encoding='utf-8')
