"""Completion in an editor, such as of ``comm.``, shows documented names only."""

import inspect
import pathlib
import re

import chainer
import pytest

import chainermn
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase

REFERENCE = pathlib.Path(__file__).parents[2] / 'docs' / 'reference'


def public(names):
    return {name for name in names if not name.startswith('_')}


def documented(cls):
    """The attributes of a class in docs/reference: members, and attributes in its docstring."""
    pages = '\n'.join(page.read_text(encoding='utf-8') for page in REFERENCE.glob('*.rst'))
    found = re.search(
        rf'^\.\. autoclass:: [\w.]+\.{cls.__name__}(?:\(\))?\n   :members:(.*)$', pages, re.M)
    members = public(found[1].replace(',', ' ').split() or [
        name for name, member in inspect.getmembers(cls) if inspect.getdoc(member)])
    assert all(inspect.getdoc(getattr(cls, name)) for name in members)
    attributes = re.findall(r'^    (\w+): ', inspect.getdoc(cls).partition('Attributes:')[2], re.M)
    return members | {*attributes}


@pytest.mark.mpi_skip
@pytest.mark.parametrize('name', ['naive', 'flat', 'dummy'])
def test_communicators(name):
    comm = chainermn.create_communicator(name)
    there = documented(chainermn.CommunicatorBase) | documented(MpiCommunicatorBase)
    assert {'rank', 'bcast', 'mpi_comm', 'transport_class'} <= there
    assert public(dir(comm)) <= there


@pytest.mark.parametrize('options', [{}, {'overlap': True}, {'shard_states': True}])
def test_optimizers(options):
    actual = chainer.optimizers.Adam()
    comm = chainermn.create_communicator('naive')
    optimizer = chainermn.create_multi_node_optimizer(actual, comm, **options)
    extra = public(dir(optimizer)) - public(dir(actual))
    assert {'actual_optimizer', 'communicator'} <= extra
    assert extra <= documented(chainermn.MultiNodeOptimizer)


@pytest.mark.mpi_skip
def test_the_package():
    assert public(dir(chainermn)) <= {*chainermn.__all__, 'nccl', 'testing'}
