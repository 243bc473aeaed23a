"""Every public name is in the reference, under a name that can be imported."""

import importlib
import pathlib
import re
import runpy
import types
import typing

import pytest
from public_names import PACKAGES, find, public

import chainermn

pytestmark = pytest.mark.mpi_skip

REFERENCE = pathlib.Path(__file__).parents[2] / 'docs' / 'reference'

#: Every dotted name of ChainerMN 7, by module.
OF_CHAINERMN_7 = runpy.run_path(
    str(REFERENCE.parents[1] / 'tests' / 'test_public_paths.py'))['PATHS']


def documented():
    """What the reference shows: objects by id."""
    found = {}
    for page in REFERENCE.glob('*.rst'):
        text = page.read_text(encoding='utf-8')
        for kind, path in re.findall(r'^\.\. (?:auto|py:)(\w+):: ([\w.]+)(?:\(\))?$', text, re.M):
            if kind != 'module':
                found[id(find(path))] = path
                continue
            module = importlib.import_module(path)
            if re.search(rf'automodule:: {re.escape(path)}\n   :members:', text):
                public = getattr(module, '__all__', ())  # of which autodoc shows all
                found.update((id(one), name) for name, one in vars(module).items() if name in public
                             or (getattr(one, '__module__', None) == path and name[0] != '_'))
    return found


def test_every_public_name_is_there():
    there = documented()
    assert len(there) > 50
    compatible = [f'{module}.{name}' for module, names in OF_CHAINERMN_7.items() for name in names]
    missing = [path for path in (*public(), *compatible) if id(find(path)) not in there]
    assert not missing, 'in no page of docs/reference: ' + ', '.join(missing)


def test_the_index_has_every_name():
    index = REFERENCE.joinpath('index.rst').read_text(encoding='utf-8')
    there = {id(find(name)) for name in re.findall(r'^   (chainermn\.[\w.]+)$', index, re.M)}
    assert len(there) > 50
    missing = [path for path in public() if isinstance(find(path), type | types.FunctionType)
               and not typing.get_origin(find(path)) and id(find(path)) not in there]
    assert not missing, 'not in docs/reference/index.rst: ' + ', '.join(missing)


def test_the_overview_has_every_operation():
    text = REFERENCE.joinpath('communicators.rst').read_text(encoding='utf-8')
    listed = re.findall(r'^   ~chainermn.CommunicatorBase.(\w+)$', text, re.M)
    operations = {name for name in vars(chainermn.CommunicatorBase) if name[0] != '_'}
    assert sorted(listed) == sorted(operations)


def test_every_package_that_has_public_names_is_looked_at():
    root = pathlib.Path(chainermn.__file__).parent
    packages = {'chainermn', *(
        f'chainermn.{path.parent.name}' for path in root.glob('[!_]*/__init__.py'))}
    assert packages <= set(PACKAGES)


def test_every_command_is_there():
    from chainermn.__main__ import _COMMANDS

    text = (REFERENCE / 'commands.md').read_text(encoding='utf-8')
    missing = [name for name in _COMMANDS if f'`chainermn {name}' not in text]
    assert not missing, 'not in commands.md: ' + ', '.join(missing)
