"""Style and types: the checks of ``tox -e lint``, as tests in the environment of the tests."""

import ast
import collections
import pathlib
import re
import subprocess
import sys

import pytest
from time_limits import seconds

pytestmark = [pytest.mark.mpi_skip, pytest.mark.limit(180)]

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize('module, options', [
    ('ruff', ['check', '.']), pytest.param('mypy', [], marks=pytest.mark.slow)])
def test_nothing_is_found(module, options):
    pytest.importorskip(module, reason=f'needs {module}')
    done = subprocess.run([sys.executable, '-m', module, *options], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds(170))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize('name', ['setup.py', 'build_backend.py'])
def test_older_pythons_run_the_build(name):
    """The build runs before pip reports that a Python version is too old."""
    tree = ast.parse((ROOT / name).read_text(encoding='utf-8'), feature_version=(3, 7))
    assert any(isinstance(node, ast.ImportFrom) and node.module == '__future__'
               and node.names[0].name == 'annotations' for node in tree.body)


def test_no_two_classes_share_a_name():
    files = collections.defaultdict(list)
    for package in ('chainermn', 'chainer_compat'):
        for path in ROOT.joinpath(package).rglob('*.py'):
            for name in re.findall(r'^ *class (\w+)[(:]', path.read_text(encoding='utf-8'), re.M):
                files[name].append(str(path.relative_to(ROOT)))
    assert [(name, paths) for name, paths in files.items() if len(paths) > 1] == []
