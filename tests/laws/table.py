"""The table of all laws in docs/developers.md: ``python tests/laws/table.py`` writes it."""

import ast
import pathlib

FOLDER = pathlib.Path(__file__).parent
PAGE = FOLDER.parents[1] / 'docs' / 'developers.md'
BEGIN, END = '<!-- laws -->\n', '<!-- end of laws -->\n'


def laws():
    """Yield the file, the name and the docstring of each law."""
    for path in sorted(FOLDER.glob('test_*.py')):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                    isinstance(each, ast.Call) and getattr(each.func, 'id', '') == 'law'
                    for each in node.decorator_list):
                yield path.name, node.name, ast.get_docstring(node) or ''


def table():
    """Return the rows, by file."""
    lines, current = ['| law | test |\n', '|---|---|\n'], ''
    for file, name, text in laws():
        sentence = ' '.join(text.split('\n\n')[0].split()).replace('``', '`').replace('|', r'\|')
        where = f'`{name}`' if file == current else f'`tests/laws/{file}`: `{name}`'
        lines.append(f'| {sentence} | {where} |\n')
        current = file
    return ''.join(lines)


def written(page):
    """Return the page with the current table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == '__main__':
    PAGE.write_text(written(PAGE.read_text()))
