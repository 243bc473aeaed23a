"""Examples in docstrings are true, and every public function has one."""

import doctest
import importlib
import os
import pathlib
import subprocess
import sys

import docstring_examples
import pytest
from public_names import public
from time_limits import seconds

import chainermn

pytestmark = pytest.mark.mpi_skip

ROOT = pathlib.Path(chainermn.__file__).parent


def test_every_public_function_has_an_example():
    docstrings = docstring_examples.public_docstrings(public())
    without = {name for name, docstring in docstrings.items() if '>>>' not in docstring}
    exceptions = set().union(*docstring_examples.EXCEPTIONS.values())
    assert not without - exceptions and not exceptions - without
    skipped = {name for name, docstring in docstrings.items() if '+SKIP' in docstring}
    assert skipped == docstring_examples.ON_GPUS
    assert len(docstrings) - len(without) > 100


@pytest.mark.slow
def test_examples_of_public_functions():
    """In one job, since each takes a few milliseconds."""
    done = subprocess.run(
        ['mpiexec', '-n', '2', sys.executable, docstring_examples.__file__],
        env={**os.environ, 'CHAINERMN_TIMEOUT': f'{seconds(20)}'}, timeout=seconds(50), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and 'ran the examples' in done.stdout, done.stdout


def test_a_wrong_example_fails():
    assert docstring_examples.run({'chainermn.launch': '>>> 1 + 1\n3'}, 0) == 1
    assert docstring_examples.run({'chainermn.launch': '>>> 1 + 1\n2'}, 0) == 0


def test_examples_of_private_functions():
    public_ones = docstring_examples.public_docstrings(public()).values()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    for path in sorted(ROOT.rglob('*.py')):
        if '>>>' in path.read_text(encoding='utf-8'):
            name = '.'.join(('chainermn', *path.relative_to(ROOT).with_suffix('').parts))
            module = importlib.import_module(name.removesuffix('.__init__'))
            for test in doctest.DocTestFinder().find(module):
                if test.docstring not in public_ones:
                    runner.run(test)
    failed, tried = runner.summarize()
    assert failed == 0 and tried > 3
