"""Blocks of code fit into the width of the site."""

import pathlib
import re
import runpy

import pytest

pytestmark = pytest.mark.mpi_skip

DOCS = pathlib.Path(__file__).parents[2] / 'docs'
RUN_BLOCKS = runpy.run_path(str(DOCS / 'run_blocks.py'))

#: Columns of a block, which docs/_static/code.css makes room for.
COLUMNS = int(re.search(r'^COLUMNS, WIDE, WIDER = (\d+)',
                        DOCS.joinpath('appearance.py').read_text(encoding='utf-8'), re.M)[1])


def blocks():
    """Page, line, language and code of each block, without the indentation of the block."""
    for page in RUN_BLOCKS['all_pages']():
        text = DOCS.parent.joinpath(page).read_text(encoding='utf-8')
        for found in RUN_BLOCKS['BLOCK'].finditer(text):
            _, indent, _, language, code = found.groups()
            yield (f'{page}:{text.count(chr(10), 0, found.start(3)) + 1}', language.strip(),
                   [line.removeprefix(indent) for line in code.splitlines()])


def test_each_has_a_language():
    """Without one, Sphinx colors it as Python."""
    languages = {place: language for place, language, _ in blocks()}
    assert len(languages) > 150
    assert not [place for place, language in languages.items() if not language]


def test_lines_fit():
    """Output is wrapped, so it can be wider."""
    assert not [(place, line) for place, language, lines in blocks() for line in lines
                if language != 'text' and len(line) > COLUMNS]
