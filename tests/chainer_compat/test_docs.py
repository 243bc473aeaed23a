"""The table of shims in docs/reference/shims.md matches the registry."""

import pathlib
import re

import pytest

from chainer_compat import shims  # noqa: F401  (fills the registry)
from chainer_compat.patching import registry

pytestmark = pytest.mark.mpi_skip

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'reference' / 'shims.md'


def row(shim):
    why = ' '.join(shim.__doc__.split())
    versions = re.match(r'\w+ >= [\d.]+', why)
    modules = '<br>'.join(f'`{name}`' for name in registry.modules_of(shim))
    return (f'| `{shim.__name__}` | {versions[0] if versions else "all"} | {modules} '
            f'| {why.replace("``", "`")} |')


def test_table():
    table = [row(shim) for shim in registry.find_shims()]
    found = [line for line in PAGE.read_text(encoding='utf-8').splitlines()
             if line.startswith('| `') and line.count('|') == 5]
    assert found == table, 'the table should be\n' + '\n'.join(table)
