"""The pictures of docs/model_parallelism.md are what their script draws."""

import pathlib
import runpy

import pytest

pytestmark = pytest.mark.mpi_skip

PICTURES = pathlib.Path(__file__).parents[2] / 'docs' / 'pictures'


def test_the_pictures_are_drawn_by_their_script():
    drawn = runpy.run_path(str(PICTURES / 'model_parallelism.py'))['draw']()
    page = PICTURES.parent.joinpath('model_parallelism.md').read_text(encoding='utf-8')
    for name, picture in drawn.items():
        assert f'](pictures/{name})' in page
        assert picture == PICTURES.joinpath(name).read_text(encoding='utf-8'), (
            'run python docs/pictures/model_parallelism.py')
