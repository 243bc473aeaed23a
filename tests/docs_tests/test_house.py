"""The picture in docs/developers.md shows the code as it is."""

import pathlib
import runpy

import pytest

pytestmark = pytest.mark.mpi_skip

DOCS = pathlib.Path(__file__).parents[2] / 'docs'


def test_the_picture_shows_todays_rooms_and_imports():
    drawn = runpy.run_path(str(DOCS / 'house.py'))['draw']()
    assert drawn == DOCS.joinpath('house.svg').read_text(encoding='utf-8'), (
        'a room is new, or imports another one: run python docs/house.py')
