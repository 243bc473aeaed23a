"""Pictures show the words that their scripts draw now; numbers may differ.

A picture that another script writes fails ``test_every_picture_has_a_test``.
"""

import importlib
import pathlib
import runpy
import sys

import pytest

pytestmark = pytest.mark.mpi_skip

DOCS = pathlib.Path(__file__).parents[2] / 'docs'
PICTURES = DOCS / 'pictures'
@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(PICTURES))
    yield
    for name in ('svg', 'timeline', 'training_step', 'model_parallelism'):
        sys.modules.pop(name, None)


def labels(picture):
    return importlib.import_module('svg').labels(picture)


def test_every_picture_has_a_test():
    assert {path.name for path in DOCS.glob('*.svg')} == {'architecture.svg', 'chainer_compat.svg'}
    assert {path.name for path in PICTURES.iterdir() if path.suffix not in ('.py', '')} == {
        'chain_list.svg', 'channels.svg', 'grid.svg', 'pipeline.svg',  # model_parallelism.py
        'pseudo_connect.svg', 'check1.svg', 'check4.svg', 'timeline.svg', 'training_step.svg'}


def test_packages():
    architecture = runpy.run_path(str(DOCS / 'architecture.py'))
    for package in architecture['packages']():
        picture = DOCS.joinpath(architecture['PICTURES'][package.name])
        assert architecture['draw'](package) == picture.read_text(encoding='utf-8'), (
            'run python docs/architecture.py')


def test_model_parallelism():
    page = DOCS.joinpath('model_parallelism.md').read_text(encoding='utf-8')
    for name, picture in importlib.import_module('model_parallelism').draw().items():
        assert f'](pictures/{name})' in page
        assert picture == PICTURES.joinpath(name).read_text(encoding='utf-8'), (
            'run python docs/pictures/model_parallelism.py')


@pytest.mark.slow
def test_training_step():
    """Its numbers are those of the benchmark."""
    drawn = importlib.import_module('training_step').draw()
    picture = PICTURES.joinpath('training_step.svg').read_text(encoding='utf-8')
    texts = [[line.partition('>')[2] for line in text.splitlines() if '<text' in line]
             for text in (drawn, picture)]
    assert len(texts[0]) > 20
    assert texts[0] == texts[1], 'run python docs/pictures/training_step.py'
