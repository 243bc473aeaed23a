"""Pictures show the words that their scripts draw now; numbers may differ.

A picture that another script writes fails ``test_every_picture_has_a_test``.
"""

import importlib
import pathlib
import re
import runpy
import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
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
        'pseudo_connect.svg', 'check1.svg', 'check4.svg', 'compare.svg', 'timeline.svg',
        'training_step.svg'}


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


def test_compare(tmp_path):
    """Its words are those that the command draws."""
    pytest.importorskip('matplotlib')
    from chainermn._records import plot, read, run_record

    np.random.seed(0)
    model = L.Linear(3, 2)
    for rate, name in ((.1, 'a'), (.2, 'b')):
        optimizer = chainer.optimizers.SGD(rate).setup(model)
        run_record.record(optimizer, str(tmp_path / name))
        for _ in range(5):
            optimizer.update(lambda: F.sum(model(np.ones((1, 3), 'f')) ** 2))
    svg = importlib.import_module('svg')
    drawn = svg.labels(svg.from_figure(plot.draw(
        *(read.RecordedRun(tmp_path / name) for name in 'ab'))))
    words = {word for word in svg.labels(PICTURES / 'compare.svg') if re.match('[a-z]', word)}
    assert words == {word for word in drawn if re.match('[a-z]', word)} == {
        'loss', 'loss of rank#', 'norm of gradients', 'norm of parameters', 'relative difference',
        'update'}


@pytest.mark.slow
def test_training_step():
    """Its numbers are those of the benchmark."""
    drawn = importlib.import_module('training_step').draw()
    picture = PICTURES.joinpath('training_step.svg').read_text(encoding='utf-8')
    texts = [[line.partition('>')[2] for line in text.splitlines() if '<text' in line]
             for text in (drawn, picture)]
    assert len(texts[0]) > 20
    assert texts[0] == texts[1], 'run python docs/pictures/training_step.py'
