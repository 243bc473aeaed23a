"""docs/developers.md shows the code as it is."""

import pathlib
import re
import runpy

import pytest

pytestmark = pytest.mark.mpi_skip

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / 'docs'


def test_the_diagram_shows_every_package():
    """Not byte by byte: where a box is does not matter."""
    module = runpy.run_path(str(DOCS / 'architecture.py'))
    layers, _, _ = module['read_code']()
    shown = re.findall(r'font-weight="bold">(\w+)<', DOCS.joinpath('architecture.svg').read_text())
    names = {name for names in layers for name in names} - module['HIDDEN']
    assert set(shown) == names and len(shown) <= 21, 'run python docs/architecture.py'


def test_files_that_the_page_names_are_there():
    page = DOCS.joinpath('developers.md').read_text(encoding='utf-8')
    named = set(re.findall(r'`([\w./*]+(?:\.py|/))`', page))
    assert len(named) > 20
    for name in named:
        assert any(list(ROOT.glob(f'{folder}{name}'))
                   for folder in ('', 'chainermn/')), name
