"""Generate docs/architecture.svg, a diagram of layers and imports, from the code.

Run ``python docs/architecture.py`` after adding a module or an import between modules.
``tests/test_imports_go_down.py`` defines the layers and checks them.
"""

from __future__ import annotations

import ast
import html
import pathlib
import runpy
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]
PICTURE = ROOT / 'docs' / 'architecture.svg'

#: From left to right; a layer with many modules has two rows. Others come last.
ORDER = [
    'testing', 'links', 'datasets', 'iterators', 'extensions', 'kvstore', '_commands',
    'functions', 'optimizers', 'nccl', 'global_except_hook', '_timeline', '_process', '_types',
]
#: Facade, entry point, and names without an idea of their own.
HIDDEN = {'__init__', '__main__', '_at_import', '_types', '_version'}
PER_ROW = 7
WIDTH, HEIGHT, LOW, GAP, MARGIN = 156, 98, 44, 14, 16
BETWEEN = 44  # layers

BOX = '<rect x="{}" y="{}" width="{}" height="{}" rx="4" fill="{}" stroke="#345"/>'
TEXT = '<text x="{}" y="{}" font-size="{}" fill="#123"{}>{}</text>'
LINE = ('<line x1="{:.0f}" y1="{}" x2="{:.0f}" y2="{}" stroke="#789" stroke-width="1.5" '
        'marker-end="url(#tip)"/>')


def read_code() -> tuple[list[set[str]], dict[str, set[str]], dict[str, str]]:
    """Return the layers, the imports of each module, and the first sentence of its docstring."""
    code = runpy.run_path(str(ROOT / 'tests' / 'test_imports_go_down.py'))
    imports: dict[str, set[str]] = {}
    ideas = {}
    for path in code['FILES']:
        module = code['layer'](path)
        found = (name.split('.')[1] for name in code['imported'](path)
                 if name.startswith('chainermn.'))
        imports.setdefault(module, set()).update(
            name for name in found if name in code['LEVELS'] and name != module)
        if path.parts[1:] in ((), ('__init__.py',)):
            text = ast.get_docstring(ast.parse((code['ROOT'] / path).read_text(encoding='utf-8')))
            first = (text or '').splitlines()[0].replace('``', '')
            ideas[module] = first.split('.  ')[0].rstrip('.')
    return code['LAYERS'], imports, ideas


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


def draw() -> str:
    """Return the diagram as SVG."""
    layers, imports, ideas = read_code()
    places = place(layers)
    lines, boxes = [], []
    for module, (x, y, width, height) in places.items():
        for other in sorted(imports[module] - HIDDEN):
            left, top, its_width, _ = places[other]
            start = min(max(left + its_width / 2, x + 20), x + width - 20)
            end = min(max(start, left + 20), left + its_width - 20)
            lines.append(LINE.format(start, y + height, end, top - 2))
        boxes.append(BOX.format(x, y, width, height, '#f8f6ee' if module[0] == '_' else '#eef3f8'))
        boxes.append(TEXT.format(x + 8, y + 18, 13, ' font-weight="bold"', module))
        for n, text in enumerate(textwrap.wrap(ideas[module], width // 6 - 3)):
            boxes.append(TEXT.format(x + 8, y + 34 + 14 * n, 11, '', html.escape(text)))
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
    PICTURE.write_text(draw(), encoding='utf-8')
