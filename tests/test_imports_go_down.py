"""The floors of the house: a module imports only what is below it."""

import ast
import pathlib

import pytest

import chainermn

ROOT = pathlib.Path(chainermn.__file__).parent

#: Highest first. A name is a module of the package or a folder of modules.
FLOORS = [
    {'__init__', '__main__'},
    {'links'},
    {'functions', 'datasets', 'iterators', 'optimizers', 'extensions', 'kvstore', '_join',
     'testing', '_launch', '_run', '_check', '_timeline'},
    {'communicators'},
    {'nccl', 'global_except_hook', '_delegate', '_forked', '_mpiexec', '_version'},
    {'_exit_status', '_streams'},
]
LEVELS = {name: -level for level, names in enumerate(FLOORS) for name in names}

FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob('*.py'))


def imported(path):
    """Dotted names of all that a file imports, wherever in it."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{path}:{node.lineno} imports relatively; write chainermn....'
            # "from chainermn import nccl" may name a module
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def room(path):
    return path.parts[0].removesuffix('.py')


def faults(path, names):
    here = room(path)
    for name in names:
        package, *rest = name.split('.')
        if package == 'mpi4py' and here not in ('communicators', 'global_except_hook'):
            yield f'{name}: only communicators/ and global_except_hook.py speak to MPI'
        if name.startswith(('cupy.cuda.nccl', 'cupy_backends.cuda.libs.nccl')) and here != 'nccl':
            yield f'{name}: only nccl.py speaks to NCCL'
        if package != 'chainermn':
            continue
        there = rest[0] if rest else '__init__'
        if there not in LEVELS:  # "from chainermn import create_communicator"
            yield f'{name}: nobody imports the facade'
        elif here != there and LEVELS[there] >= LEVELS[here]:
            yield f'{name}: {there} is not below {here}'
        elif (here not in ('__init__', 'communicators', '_check') and there == 'communicators'
              and rest[1:2] not in (['communicator_base'], ['create_communicator'],
                                    ['CommunicatorBase'], ['compression'])):
            yield f'{name}: only the interface is known above communicators/'


@pytest.mark.parametrize('path', FILES, ids=str)
def test_imports_go_down(path):
    assert room(path) in LEVELS, f'add {room(path)} to FLOORS'
    assert list(faults(path, imported(path))) == []


@pytest.mark.parametrize('path, name', [
    ('datasets/scatter.py', 'mpi4py.MPI'),
    ('datasets/scatter.py', 'chainermn'),
    ('datasets/scatter.py', 'chainermn.create_communicator'),
    ('datasets/scatter.py', 'chainermn.optimizers'),
    ('datasets/scatter.py', 'chainermn.links.batch_normalization'),
    ('datasets/scatter.py', 'chainermn.communicators.naive_communicator.NaiveCommunicator'),
    ('communicators/naive_communicator.py', 'chainermn.datasets'),
    ('communicators/pure_nccl_communicator.py', 'cupy.cuda.nccl'),
    ('_delegate.py', 'chainermn.nccl'),
    ('nccl.py', 'mpi4py'),
])
def test_an_import_that_goes_up_is_found(path, name):
    assert list(faults(pathlib.Path(path), [name]))


@pytest.mark.parametrize('path, name', [
    ('__init__.py', 'chainermn.datasets.scatter'),
    ('datasets/scatter.py', 'chainermn.datasets._part'),
    ('datasets/scatter.py', 'chainermn.communicators.communicator_base.CommunicatorBase'),
    ('communicators/naive_communicator.py', 'chainermn.communicators._wire'),
    ('communicators/naive_communicator.py', 'mpi4py.MPI'),
    ('nccl.py', 'cupy.cuda.nccl'),
])
def test_an_import_that_goes_down_is_not(path, name):
    assert not list(faults(pathlib.Path(path), [name]))


def test_nothing_asks_which_communicator_it_has():
    """What differs between communicators is a public verb or property of the interface."""
    for path in FILES:
        if room(path) in ('communicators', '__init__'):
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding='utf-8'))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == 'isinstance':
                asked = ast.unparse(node.args[1])
                assert 'Communicator' not in asked.replace('CommunicatorBase', ''), (
                    f'{path}:{node.lineno}')
