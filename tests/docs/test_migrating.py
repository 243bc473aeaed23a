"""Functions, parameters, commands and variables in the pages on migrating exist."""

import argparse
import ast
import importlib
import inspect
import pathlib
import re
import runpy

import chainer
import pytest

import chainermn
from chainermn.__main__ import _COMMANDS
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase

pytestmark = pytest.mark.mpi_skip

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ['migrating.md', 'migrating_pytorch.md', 'migrating_horovod.md']

#: Of ChainerMN 7, whose every name the page tells.
PACKAGES = [
    'chainermn', 'chainermn.communicators', 'chainermn.datasets', 'chainermn.extensions',
    'chainermn.functions', 'chainermn.global_except_hook', 'chainermn.iterators', 'chainermn.links',
    'chainermn.optimizers', 'chainermn.testing',
]

KNOWN = {'chainermn': chainermn, 'chainer': chainer, 'comm': MpiCommunicatorBase,
         'optimizer': chainer.optimizers.SGD}


def column():
    """The code in the column "ChainerMN 8" of all tables of names, with its place."""
    for page in PAGES:
        here = None
        lines = ROOT.joinpath('docs', page).read_text(encoding='utf-8').splitlines()
        for number, line in enumerate(lines, 1):
            cells = [cell.strip() for cell in line.strip('|').split('|')]
            if not line.startswith('|'):
                here = None
            elif {'ChainerMN 8', 'remark'} <= {*cells}:  # not a table of changes
                here = cells.index('ChainerMN 8')
            elif here is not None:
                for code in re.findall('`(.*?)`', cells[here]):
                    yield f'{page}:{number}', code


CODES = list(column())


def test_there_are_such_tables():
    assert len(CODES) > 100
    assert {where.partition(':')[0] for where, _ in CODES} == set(PAGES)


@pytest.mark.parametrize('code', sorted({code for _, code in CODES}))
def test_it_is_there(code):
    if code.startswith(('mpiexec ', 'chainermn ')):
        check_command(code)
    elif variable := re.fullmatch(r'(CHAINERMN_\w+)=[\w.]+', code):
        package = pathlib.Path(chainermn.__file__).parent
        assert any(variable[1] in path.read_text(encoding='utf-8')
                   for path in package.rglob('*.py'))
    else:
        nodes = list(ast.walk(ast.parse(code, mode='eval')))
        for node in nodes:
            if isinstance(node, ast.Call):
                check_call(node)
            elif isinstance(node, ast.Attribute) and rooted(node) in KNOWN:
                resolve(node)


def rooted(node):
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id


def resolve(node):
    if isinstance(node, ast.Name):
        return KNOWN[node.id]
    if isinstance(node, ast.Call):
        return resolve(node.func)  # good for a class, and for a device
    found = resolve(node.value)
    if inspect.ismodule(found) and not hasattr(found, node.attr):
        return importlib.import_module(f'{found.__name__}.{node.attr}')
    if found is chainer.get_device:
        return getattr(chainer.get_device('@numpy'), node.attr)
    return getattr(found, node.attr)


def check_call(node):
    function = resolve(node.func)
    parameters = inspect.signature(function).parameters
    is_method = isinstance(node.func, ast.Attribute) and rooted(node.func) in ('comm', 'optimizer')
    n_given = len(node.args) + is_method + len(node.keywords)
    assert n_given <= len(parameters) or any(
        p.kind == p.VAR_KEYWORD for p in parameters.values())
    for keyword in node.keywords:
        assert keyword.arg in parameters or f' {keyword.arg} ' in function.__doc__, keyword.arg


def check_command(code):
    words = code.split()
    if words[0] == 'mpiexec':
        assert words[:2] == ['mpiexec', '-n']
        return
    parser = argparse.ArgumentParser()
    importlib.import_module(_COMMANDS[words[1]][1]).add_arguments(parser)
    parser.parse_args(words[2:])


def test_every_public_name_of_chainermn_7_is_named():
    page = ROOT.joinpath('docs/migrating.md').read_text(encoding='utf-8')
    named = set(re.findall(r'\w+', ' '.join(re.findall('`(.*?)`', page))))
    paths = runpy.run_path(str(ROOT / 'tests' / 'test_public_paths.py'))['PATHS']
    missing = {name for module in PACKAGES for name in paths[module]} - named
    assert not missing
