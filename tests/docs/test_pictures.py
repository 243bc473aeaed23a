"""Pictures show the words that their scripts draw now; numbers may differ.

A picture that another script writes fails ``test_every_picture_has_a_test``.
"""

import importlib
import os
import pathlib
import subprocess
import sys

import pytest
from time_limits import seconds

pytestmark = pytest.mark.mpi_skip

DOCS = pathlib.Path(__file__).parents[2] / 'docs'
PICTURES = DOCS / 'pictures'
#: The names of the machine, and what it lacks.
OF_THE_MACHINE = {'vm', 'no', 'none', 'no, not used', 'Hints', 'Warnings'}


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(PICTURES))
    yield
    for name in ('svg', 'timeline', 'training_step', 'model_parallelism'):
        sys.modules.pop(name, None)


def labels(picture):
    return importlib.import_module('svg').labels(picture)


def test_every_picture_has_a_test():
    assert {path.name for path in DOCS.glob('*.svg')} == {'architecture.svg'}  # test_architecture
    assert {path.name for path in PICTURES.iterdir() if path.suffix not in ('.py', '')} == {
        'chain_list.svg', 'channels.svg', 'grid.svg', 'pipeline.svg',  # model_parallelism.py
        'pseudo_connect.svg', 'check1.svg', 'check4.svg', 'timeline.svg', 'training_step.svg'}


def test_model_parallelism():
    page = DOCS.joinpath('model_parallelism.md').read_text(encoding='utf-8')
    for name, picture in importlib.import_module('model_parallelism').draw().items():
        assert f'](pictures/{name})' in page
        assert picture == PICTURES.joinpath(name).read_text(encoding='utf-8'), (
            'run python docs/pictures/model_parallelism.py')


@pytest.mark.slow
def test_timeline():
    script = importlib.import_module('timeline')
    drawn = labels(script.draw(script.record(2)))
    assert {'forward', 'communication', 'waiting', 'rank #'} <= drawn
    assert labels(PICTURES / 'timeline.svg') == drawn, 'run python docs/pictures/timeline.py'


def test_training_step():
    """Its numbers are those of the benchmark."""
    drawn = importlib.import_module('training_step').draw()
    picture = PICTURES.joinpath('training_step.svg').read_text(encoding='utf-8')
    texts = [[line.partition('>')[2] for line in text.splitlines() if '<text' in line]
             for text in (drawn, picture)]
    assert len(texts[0]) > 20
    assert texts[0] == texts[1], 'run python docs/pictures/training_step.py'


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [1, 4])
def test_check(ranks, tmp_path):
    svg = tmp_path / 'check.svg'
    command = ['mpiexec', '-n', '2'] if ranks > 1 else []
    subprocess.run([*command, sys.executable, '-m', 'chainermn', 'check', '--svg', svg],
                   env=os.environ | {'OMP_NUM_THREADS': '1'}, check=True, timeout=seconds(60),
                   stdout=subprocess.DEVNULL)
    gone = labels(PICTURES / f'check{ranks}.svg') - labels(svg) - OF_THE_MACHINE
    # Paths, versions and sentences depend on what is installed.
    gone = {text for text in gone if '/' not in text and not text.startswith(('#', 'NCCL is'))}
    assert not gone, 'run python docs/pictures/check.py'
