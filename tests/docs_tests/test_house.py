"""docs/developers.md shows the code as it is."""

import pathlib
import re
import runpy

import pytest

pytestmark = pytest.mark.mpi_skip

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / 'docs'


def test_the_picture_shows_todays_rooms_and_imports():
    drawn = runpy.run_path(str(DOCS / 'house.py'))['draw']()
    assert drawn == DOCS.joinpath('house.svg').read_text(encoding='utf-8'), (
        'a room is new, or imports another one: run python docs/house.py')


def test_files_that_the_page_names_are_there():
    page = DOCS.joinpath('developers.md').read_text(encoding='utf-8')
    named = set(re.findall(r'`([\w./*]+(?:\.py|/))`', page))
    assert len(named) > 20
    for name in named:
        assert any(list(ROOT.glob(f'{folder}{name}'))
                   for folder in ('', 'chainermn/', 'chainermn/communicators/')), name
