"""Convert Google-style docstrings with reStructuredText markup to Markdown."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator

SECTION = re.compile(r'(Args|Attributes|Raises|Returns|Yields):$')
ITEM = re.compile(r'(\*{0,2}\w+)(?: \([^)]*\))?: +(.*)$')
BORDER = re.compile(r'=+( +=+)+$')
ROLE = re.compile(r':(math|\w+):`([^`]+)`')
CODE = re.compile(r'(`[^`]+`)')

#: Maps the target of a reference, such as ``chainermn.join``, to a URL, or '' if it has none.
Link = Callable[[str], str]


def to_markdown(docstring: str, link: Link) -> str:
    """Return a docstring as Markdown.

    Args:
        docstring: The docstring, as in the code.
        link: Finds the targets of references.
    """
    lines = _tables(inspect.cleandoc(docstring).splitlines())
    text = _inline('\n'.join(lines), link)
    return re.sub('\n{3,}', '\n\n', '\n'.join(_sections(text.splitlines()))).strip() + '\n'


def _tables(lines: list[str]) -> Iterator[str]:
    """Convert tables, whose columns are aligned with their borders."""
    borders = [i for i, line in enumerate(lines) if BORDER.match(line)]
    start = 0
    for top, bottom in zip(borders[::3], borders[2::3], strict=True):
        yield from lines[start:top]
        yield from _table(lines[top:bottom])
        start = bottom + 1
    yield from lines[start:]


def _table(lines: list[str]) -> Iterator[str]:
    spans = [found.span() for found in re.finditer('=+', lines[0])]
    ends = [start for start, _ in spans[1:]] + [10 ** 6]
    rows: list[list[str]] = []
    for line in lines[1:]:
        if BORDER.match(line):
            continue
        cells = [line[start:end].strip() for (start, _), end in zip(spans, ends, strict=True)]
        if cells[0] or not rows:
            rows.append(cells)
        else:  # the rest of the previous row
            rows[-1] = [' '.join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)]
    rows.insert(1, ['---'] * len(spans))
    for row in rows:
        yield f'| {" | ".join(row)} |'


def _inline(text: str, link: Link) -> str:
    """Convert code spans, references and formulas."""
    def role(found: re.Match[str]) -> str:
        kind, target = found.groups()
        if kind == 'math':
            return f'${target}$'
        name = target.removeprefix('~')
        shown = name.rpartition('.')[2] if target[0] == '~' else name
        url = link(name)
        return f'[`{shown}`]({url})' if url else f'`{shown}`'

    return re.sub(r'``(.+?)``', r'`\1`', ROLE.sub(role, text), flags=re.DOTALL)


def _sections(lines: list[str]) -> Iterator[str]:
    """Convert sections such as Args, and the text before and after each."""
    start = 0
    for i, line in enumerate(lines):
        if SECTION.match(line):
            end = next((n for n in range(i + 1, len(lines)) if lines[n][:1].strip()), len(lines))
            body = textwrap.dedent('\n'.join(lines[i + 1:end])).splitlines()
            yield from _blocks(lines[start:i])
            yield from (f'**{line}**', '')
            yield from _blocks(body) if line in ('Returns:', 'Yields:') else _items(body)
            yield ''
            start = end
    yield from _blocks(lines[start:])


def _items(lines: list[str]) -> Iterator[str]:
    """Convert a list of arguments, attributes or errors."""
    for line in lines:
        if found := ITEM.match(line):
            yield f'- `{found[1]}`: {_escape(found[2])}'
        else:
            yield _escape(line[2:] if line.startswith('    ') else line)


def _blocks(lines: list[str]) -> Iterator[str]:
    """Convert paragraphs, lists, formulas and code blocks."""
    i = 0
    while i < len(lines):
        line = lines[i]
        if line.startswith('>>>'):
            end = next((n for n in range(i, len(lines)) if not lines[n]), len(lines))
            yield from ('```python', *lines[i:end], '```')
            i = end
        elif line.endswith('::') or line.startswith('.. '):
            end = i + 1
            while end < len(lines) and (not lines[end] or lines[end].startswith(' ')):
                end += 1
            body = textwrap.dedent('\n'.join(lines[i + 1:end])).strip('\n').splitlines()
            yield from _directive(line, body)
            i = end
        else:
            yield _escape(line)
            i += 1


def _directive(line: str, body: list[str]) -> Iterator[str]:
    if line == '.. math::':
        yield from ('$$', *body, '$$', '')
    elif line.startswith('.. deprecated:: '):
        yield from (f'*Deprecated since {line.partition(":: ")[2]}:*', *map(_escape, body), '')
    else:
        if line != '::':
            yield from (_escape(line.removesuffix(':')), '')
        yield from ('```python', *body, '```', '')


def _escape(text: str) -> str:
    """Escape characters that Markdown would interpret, outside code."""
    return ''.join(
        part if part.startswith('`') else re.sub(r'(?<=\w)\*\*(?=\w)', r'\\*\\*', part)
        for part in CODE.split(text))
