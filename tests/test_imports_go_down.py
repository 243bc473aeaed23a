"""The layers: a package imports only from itself and from those in lower layers."""

import ast
import functools
import pathlib

import pytest

import chainermn

pytestmark = pytest.mark.mpi_skip

ROOT = pathlib.Path(chainermn.__file__).parent

#: Highest first. A name is a module of the package or a folder of modules.
LAYERS = [
    {'__init__', '__main__'},
    {'_at_import'},
    {'_commands', 'datasets', 'extensions', 'iterators', 'kvstore', 'links', 'testing'},
    {'functions', 'optimizers'},
    {'communicators'},
    {'_collectives'},
    {'_gradients'},
    {'_transport'},
    {'_consistency'},
    {'_diagnostics'},
    {'_shards', '_timeline', 'global_except_hook', 'nccl'},
    {'_operations'},
    {'_process', '_types', '_version'},
]
LEVELS = {name: -level for level, names in enumerate(LAYERS) for name in names}

#: What communicators are made of, which nothing above them imports.
BELOW = {'_collectives', '_gradients', '_transport', '_consistency', '_diagnostics'}

#: Of these, modules about Chainer's objects alone, which everybody above may import.
ABOUT_CHAINER = {'_gradients.loss_scale', '_gradients.tied_arrays'}

FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob('*.py'))


@functools.cache
def nodes(path):
    """The nodes of the syntax tree of a file."""
    return [*ast.walk(ast.parse((ROOT / path).read_text(encoding='utf-8')))]


def imported(path):
    """Dotted names of all that a file imports, wherever in it."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{path}:{node.lineno} imports relatively; write chainermn....'
            # "from chainermn import nccl" may name a module
            yield from (f'{node.module}.{alias.name}' for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith('import_module'):
            yield from (name.value for name in node.args if isinstance(name, ast.Constant))


def layer(path):
    return path.parts[0].removesuffix('.py')


def may_know(here, there, rest):
    """Above communicators, only their interface is known."""
    if there in BELOW:
        return LEVELS[here] <= LEVELS['communicators'] or (
            '.'.join([there, *rest[1:2]]) in ABOUT_CHAINER)
    interface = {'communicator_base', '_recognize', 'as_communicator', 'create_communicator',
                 'CommunicatorBase', 'compression', 'errors', 'CollectiveMismatchError',
                 'CommunicatorName'}
    return there != 'communicators' or here in {'__init__', 'communicators', '_commands'} or (
        rest[1] in interface)


def faults(path, names):
    here = layer(path)
    for name in names:
        package, *rest = name.split('.')
        if package == 'mpi4py' and path.as_posix() != '_process/mpi.py' and here not in {
                'communicators', 'global_except_hook'}:
            yield f'{name}: import MPI from chainermn._process.mpi, which does not initialize it'
        if rest[:2] == ['_process', 'mpi'] and here not in {
                *BELOW, '_timeline', '_commands', 'communicators'}:
            yield f'{name}: only commands, communicators and the layers below it use MPI'
        if name.startswith(('cupy.cuda.nccl', 'cupy_backends.cuda.libs.nccl')) and here != 'nccl':
            yield f'{name}: only nccl.py speaks to NCCL'
        if package != 'chainermn':
            continue
        there = rest[0] if rest else '__init__'
        if there not in LEVELS:  # "from chainermn import create_communicator"
            yield f'{name}: nobody imports the facade'
        elif here != there and LEVELS[there] >= LEVELS[here]:
            yield f'{name}: {there} is not below {here}'
        elif not may_know(here, there, rest):
            yield f'{name}: only the interface of communicators is known above it'


def test_imports_go_down():
    assert {*map(layer, FILES)} == {*LEVELS}
    assert [f'{path}: {fault}' for path in FILES for fault in faults(path, imported(path))] == []


def graph():
    """Return the modules that each module imports, wherever in it."""
    modules = {}
    for path in FILES:
        parts = ['chainermn', *path.with_suffix('').parts]
        modules['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = path
    found = {}
    for module, path in modules.items():
        names = {name if name in modules else name.rpartition('.')[0] for name in imported(path)}
        found[module] = names & set(modules) - {module}
    return found


def circles(graph):
    """Return what remains without modules that import none of the rest, or that none imports."""
    left = {module: set(names) for module, names in graph.items()}
    while True:
        used = set().union(*left.values())
        done = [module for module in left if not left[module] or module not in used]
        if not done:
            return sorted(left)
        for module in done:
            del left[module]
        left = {module: names & set(left) for module, names in left.items()}


def test_no_circles_of_modules():
    """Neither at import, nor in functions or for types."""
    assert circles({'a': {'b'}, 'b': {'c'}, 'c': {'b'}, 'd': set()}) == ['b', 'c']
    assert circles(graph()) == []


def test_no_module_is_looked_up_by_name():
    """Such an import is hidden from the tests above."""
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
                hidden = name.startswith('chainermn.') and layer(path) in BELOW and (
                    name.removeprefix('chainermn.').partition('.')[0] in LEVELS)
                assert not hidden or ' ' in name, f'{path}:{node.lineno}: {name}'


def test_kvstore_uses_public_names_only():
    """So others can build what it is: a package of their own on communicators and optimizers."""
    for path in (path for path in FILES if layer(path) == 'kvstore'):
        for name in imported(path):
            package, *parts = name.split('.')
            assert package != 'chainermn' or parts[0] == 'kvstore' or not any(
                part.startswith('_') for part in parts), f'{path}: {name}'


def test_nothing_asks_which_communicator_it_has():
    """What differs between communicators is a public operation or property of the interface."""
    for path in FILES:
        if layer(path) in {*BELOW, 'communicators', '__init__'}:
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == 'isinstance':
                asked = ast.unparse(node.args[1])
                assert 'Communicator' not in asked.replace('CommunicatorBase', ''), (
                    f'{path}:{node.lineno}')
