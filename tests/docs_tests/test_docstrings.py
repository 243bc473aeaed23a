"""Examples in docstrings are true."""

import doctest
import importlib
import pathlib

import pytest

import chainermn

pytestmark = pytest.mark.mpi_skip

ROOT = pathlib.Path(chainermn.__file__).parent
MODULES = [
    '.'.join(('chainermn', *path.relative_to(ROOT).with_suffix('').parts))
    for path in sorted(ROOT.rglob('*.py')) if '>>>' in path.read_text(encoding='utf-8')]


@pytest.mark.parametrize('module', MODULES)
def test_examples(module):
    module = importlib.import_module(module)
    failed, _ = doctest.testmod(module, extraglobs={'chainermn': chainermn},
                                optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_there_are_examples():
    assert len(MODULES) > 5
