"""SVG pictures whose labels are text instead of outlines, so that tests can read them."""

from __future__ import annotations

import html
import io
import pathlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def from_figure(figure: Figure) -> str:
    """Return a matplotlib figure as SVG; the same figure always gives the same text."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': 'chainermn',
                                'font.family': 'sans-serif'}):
        figure.savefig(file, format='svg', metadata={'Date': None, 'Creator': None})
    return re.sub(' +$', '', file.getvalue(), flags=re.M)


def labels(path_or_svg: pathlib.Path | str) -> set[str]:
    """Return the texts in a picture, except numbers."""
    svg = path_or_svg if isinstance(path_or_svg, str) else path_or_svg.read_text(encoding='utf-8')
    texts = re.findall(r'<text[^>]*>([^<]*)</text>', svg)
    without_numbers = (re.sub(r'[-\u2212]?\d[\d.,]*', '#', html.unescape(text)) for text in texts)
    return {' '.join(text.split()) for text in without_numbers} - {'', '#'}
