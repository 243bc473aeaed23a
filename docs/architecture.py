"""Generate diagrams of layers and imports from the code: architecture.svg, chainer_compat.svg.

Run ``python docs/architecture.py`` after adding a module or an import between modules.
``tests/import_layers.py`` lists the layers, and ``tests/test_imports_go_down.py`` checks them.
"""

from __future__ import annotations

import ast
import html
import pathlib
import re
import sys
import textwrap
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: The name of the diagram of each package.
PICTURES = {'chainermn': 'architecture.svg', 'chainer_compat': 'chainer_compat.svg'}

#: The order of modules in a layer, from left to right; the other modules come last. A layer with
#: many modules has two rows.
ORDER = [
    'testing', 'links', 'datasets', 'iterators', 'extensions', 'kvstore', '_commands',
    'functions', 'optimizers', 'nccl', 'global_except_hook', '_timeline', '_records', '_process',
    '_types',
]
#: Modules that are not shown: the facade, the entry point, and modules that only define names.
HIDDEN = {'__init__', '__main__', '_at_import', '_types', '_version', 'shims'}
PER_ROW = 5
WIDTH, HEIGHT, LOW, GAP, MARGIN = 160, 98, 44, 14, 16
BETWEEN = 44  # pixels between layers

BOX = '<rect x="{}" y="{}" width="{}" height="{}" rx="4" fill="{}" stroke="#345"/>'
TEXT = '<text x="{}" y="{}" font-size="{}" fill="#123"{}>{}</text>'
LINE = ('<line x1="{:.0f}" y1="{}" x2="{:.0f}" y2="{}" stroke="#789" stroke-width="1.5" '
        'marker-end="url(#tip)"/>')


def packages() -> list[Any]:
    """Return both packages with their layers."""
    sys.path.insert(0, str(ROOT / 'tests'))
    try:
        import import_layers
    finally:
        sys.path.pop(0)
    return import_layers.PACKAGES


def read_code(package: Any) -> tuple[dict[str, set[str]], dict[str, str]]:
    """Return the imports of each part, and the first sentence of its docstring."""
    imports: dict[str, set[str]] = {}
    ideas = {}
    for path in package.files:
        part = package.part(path)
        found = (name.split('.')[1] for name in package.imported(path)
                 if name.startswith(f'{package.name}.'))
        imports.setdefault(part, set()).update(
            name for name in found if name in package.levels and name != part)
        if path.parts[1:] in ((), ('__init__.py',)):
            text = ast.get_docstring(ast.parse((package.root / path).read_text(encoding='utf-8')))
            first = (text or '').splitlines()[0].replace('``', '')
            first = re.sub(r':\w+:`(?:[\w.]+\.)?(\w+)`', r'\1', first)  # roles
            ideas[part] = first.split('. ')[0].rstrip('.')
    return imports, ideas


def place(layers: list[set[str]]) -> dict[str, tuple[int, int, int, int]]:
    """Return left, top, width and height of the box of each module."""
    places = {}
    y = MARGIN
    for modules in (each for each in layers if each - HIDDEN):
        names = sorted(modules - HIDDEN, key=lambda module: (
            ORDER.index(module) if module in ORDER else len(ORDER), module))
        for start in range(0, len(names), PER_ROW):
            row = names[start:start + PER_ROW]
            width, height = WIDTH, HEIGHT
            if len(row) == 1:
                width, height = PER_ROW * (WIDTH + GAP) - GAP, LOW
            for i, module in enumerate(row):
                places[module] = (MARGIN + i * (WIDTH + GAP), y, width, height)
            y += height + GAP
        y += BETWEEN - GAP
    return places


def draw(package: Any) -> str:
    """Return the diagram of a package as SVG."""
    imports, ideas = read_code(package)
    places = place(package.layers)
    lines, boxes = [], []
    for module, (x, y, width, height) in places.items():
        for other in sorted(imports[module] - HIDDEN):
            left, top, its_width, _ = places[other]
            start = min(max(left + its_width / 2, x + 20), x + width - 20)
            end = min(max(start, left + 20), left + its_width - 20)
            lines.append(LINE.format(start, y + height, end, top - 2))
        boxes.append(BOX.format(x, y, width, height, '#f8f6ee' if module[0] == '_' else '#eef3f8'))
        boxes.append(TEXT.format(x + 8, y + 18, 14, ' font-weight="bold"', module))
        for n, text in enumerate(textwrap.wrap(ideas[module], width // 7)):
            boxes.append(TEXT.format(x + 8, y + 34 + 14 * n, 12, '', html.escape(text)))
    size = (2 * MARGIN + PER_ROW * (WIDTH + GAP) - GAP,
            max(y + height for _, y, _, height in places.values()) + MARGIN)
    return '\n'.join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        'font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#789"/></marker></defs>',
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
        *lines, *boxes, '</svg>', ''])


if __name__ == '__main__':
    for each in packages():
        (ROOT / 'docs' / PICTURES[each.name]).write_text(draw(each), encoding='utf-8')
