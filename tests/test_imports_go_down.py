"""The layers: a part of a package imports only from itself and from parts in lower layers."""

import ast

import pytest
from import_layers import CHAINER_COMPAT, CHAINERMN, PACKAGES, cycles

pytestmark = pytest.mark.mpi_skip

each_package = pytest.mark.parametrize('package', PACKAGES, ids=lambda package: package.name)

#: Parts that implement communicators. Nothing above communicators imports them.
BELOW = {'_collectives', '_gradients', '_transport', '_consistency', '_diagnostics'}

#: Modules in these parts that only handle Chainer's objects. All layers above may import them.
ABOUT_CHAINER = {'_gradients.loss_scale', '_gradients.tied_arrays'}


def may_know(here, there, rest):
    """Return whether an import is allowed: layers above communicators only use their interface."""
    if there in BELOW:
        return CHAINERMN.levels[here] <= CHAINERMN.levels['communicators'] or (
            '.'.join([there, *rest[1:2]]) in ABOUT_CHAINER)
    interface = {'communicator_base', '_recognize', 'as_communicator', 'create_communicator',
                 'CommunicatorBase', 'compression', 'errors', 'CollectiveMismatchError',
                 'CommunicatorName'}
    return there != 'communicators' or here in {'__init__', 'communicators', '_commands'} or (
        rest[1] in interface)


def faults(path, names):
    here = CHAINERMN.part(path)
    for name in names:
        package, *rest = name.split('.')
        if package == 'mpi4py' and path.as_posix() != '_process/mpi.py' and here not in {
                'communicators', 'global_except_hook'}:
            yield f'{name}: import MPI from chainermn._process.mpi, which does not initialize it'
        if rest[:2] == ['_process', 'mpi'] and here not in {
                *BELOW, '_timeline', '_commands', 'communicators'}:
            yield f'{name}: only commands, communicators and lower layers may use MPI'
        if name.startswith(('cupy.cuda.nccl', 'cupy_backends.cuda.libs.nccl')) and here != 'nccl':
            yield f'{name}: only nccl.py may use NCCL'
        there = rest[0] if rest else '__init__'
        if package == 'chainermn' and there in CHAINERMN.levels and not may_know(here, there, rest):
            yield f'{name}: layers above communicators may only use their interface'


@each_package
def test_imports_go_down(package):
    assert {*map(package.part, package.files)} == {*package.levels}
    assert [f'{path}: {fault}' for path in package.files for fault in package.upward(path)] == []


def test_what_each_layer_may_know():
    assert [f'{path}: {fault}' for path in CHAINERMN.files
            for fault in faults(path, CHAINERMN.imported(path))] == []


def test_chainer_compat_does_not_know_chainermn():
    for path in CHAINER_COMPAT.files:
        if path.name == 'early_failures.py':
            continue  # a part of the startup hook, which serves both packages
        for name in CHAINER_COMPAT.imported(path):
            assert name.partition('.')[0] not in ('chainermn', 'mpi4py'), f'{path}: {name}'


@each_package
def test_no_import_cycles(package):
    """Imports in functions and imports for types also count."""
    assert cycles({'a': {'b'}, 'b': {'c'}, 'c': {'b'}, 'd': set()}) == ['b', 'c']
    assert cycles(package.graph()) == []


def test_no_module_is_looked_up_by_name():
    """The tests above cannot see an import by the name of a module."""
    for path in CHAINERMN.files:
        for node in CHAINERMN.nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
                hidden = name.startswith('chainermn.') and CHAINERMN.part(path) in BELOW and (
                    name.removeprefix('chainermn.').partition('.')[0] in CHAINERMN.levels)
                assert not hidden or ' ' in name, f'{path}:{node.lineno}: {name}'


def test_kvstore_uses_public_names_only():
    """It shows that other packages can be built on the public API in the same way."""
    for path in (path for path in CHAINERMN.files if CHAINERMN.part(path) == 'kvstore'):
        for name in CHAINERMN.imported(path):
            package, *parts = name.split('.')
            assert package != 'chainermn' or parts[0] == 'kvstore' or not any(
                part.startswith('_') for part in parts), f'{path}: {name}'


def test_no_code_checks_the_class_of_its_communicator():
    """Where communicators differ, the interface has a public operation or property."""
    for path in CHAINERMN.files:
        if CHAINERMN.part(path) in {*BELOW, 'communicators', '__init__'}:
            continue
        for node in CHAINERMN.nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == 'isinstance':
                asked = ast.unparse(node.args[1])
                assert 'Communicator' not in asked.replace('CommunicatorBase', ''), (
                    f'{path}:{node.lineno}')
