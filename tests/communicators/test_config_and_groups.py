"""Configuration, groups and the end of a communicator."""

import time

import numpy as np
import pytest
from contract import NAMES, call
from each_case import each_case
from mpi4py import MPI

from chainermn.communicators import create_communicator

pytestmark = pytest.mark.every_size


@pytest.fixture
def own(name):
    """A communicator for one test alone."""
    return create_communicator(name)


def test_config_belongs_to_one_object(own, name):
    other = create_communicator(name, batched_copy=False)
    for comm, value in ((own, True), (other, False)):
        assert comm.get_config('batched_copy') is comm.batched_copy is value
        assert comm.get_config()['batched_copy'] is comm.get_config(None)['batched_copy'] is value
    own.set_config('batched_copy', False)
    other.set_config('batched_copy')
    assert (own.batched_copy, other.batched_copy) == (False, True)
    own.get_config()['batched_copy'] = 'changed'  # of a copy
    assert own.get_config('batched_copy') is False


def test_unknown_items(own):
    with pytest.raises(ValueError, match="no configuration item 'no_such'"):
        own.set_config('no_such', 1)
    with pytest.raises(KeyError, match='no_such'):
        own.get_config('no_such')
    with pytest.raises(TypeError, match='flavor'):
        own.set_config('batched_copy', True, flavor=1)
    assert 'no_such' not in own.get_config()


def test_config_scope(own, name):
    """Attributes set within it become configuration items of this communicator only."""
    assert own.within_config_scope is False
    own.before = 1
    with own.config_scope():
        assert own.within_config_scope is True
        own.mine = 2
        with own.config_scope():
            own.inner = 3
        assert own.within_config_scope is True
        own.batched_copy = False
    assert own.within_config_scope is False
    own.after = 4
    items = own.get_config()
    assert (items['mine'], items['inner'], items['batched_copy']) == (2, 3, False)
    assert 'before' not in items
    assert 'after' not in items
    assert (own.before, own.mine, own.inner, own.after) == (1, 2, 3, 4)
    assert 'mine' not in create_communicator(name).get_config()


def test_config_scope_ends_with_an_error(own):
    with pytest.raises(ZeroDivisionError), own.config_scope():
        raise ZeroDivisionError
    assert own.within_config_scope is False


def test_split(own, check_usable):
    """laws/test_collectives.py tests parts of any ranks in any order."""
    own.set_config('batched_copy', False)
    with own.config_scope():
        own.mine = 'kept'
    part = own.split(own.rank % 2, -own.rank)
    assert type(part) is type(own)
    assert part.get_config() == own.get_config()
    assert part.get_config('mine') == part.mine == 'kept'
    part.set_config('batched_copy', True)
    assert own.get_config('batched_copy') is False
    part.finalize()
    check_usable(own)


def test_finalized_group_frees_its_mpi_communicators(own):
    """MPI is limited to about 2000 communicators, and a group uses several."""
    for make in (lambda: own.split(0, 0), lambda: own.new_group(range(own.size))):
        part = make()
        part.finalize()
        assert part.mpi_comm == MPI.COMM_NULL
    assert own.mpi_comm != MPI.COMM_NULL


def test_new_group(own, check_usable):
    """Ranks are numbered in the order given; other ranks get None."""
    for ranks in ([0], [own.size - 1], list(range(own.size)), list(reversed(range(own.size))),
                  np.arange(0, own.size, 2)):
        group = own.new_group(ranks)
        if own.rank not in ranks:
            assert group is None
            continue
        assert type(group) is type(own)
        assert group.get_config() == own.get_config()
        assert (group.rank, group.size) == (list(ranks).index(own.rank), len(ranks))
        assert group.allgather_obj(own.rank) == list(ranks)
        with pytest.raises(ValueError, match=f'root must be a rank from 0 to {len(ranks) - 1}'):
            group.bcast(np.zeros(1), len(ranks))  # a rank outside of the group
        check_usable(group)
        group.finalize()
    check_usable(own)


OTHERS = {
    'send': lambda comm: comm.send(np.ones(2), (comm.rank + 1) % comm.size, 0),
    'recv': lambda comm: comm.recv((comm.rank + 1) % comm.size, 0),
    'isend': lambda comm: comm.isend(np.ones(2), 0),
    'irecv': lambda comm: comm.irecv(0),
    'send_activation': lambda comm: comm._chainermn_channel.send_activation(
        np.ones(2), (comm.rank + 1) % comm.size, 0, True),
    'recv_activation': lambda comm: comm._chainermn_channel.recv_activation(
        (comm.rank + 1) % comm.size, 0),
    'send_obj': lambda comm: comm.send_obj(1, comm.rank),
    'recv_obj': lambda comm: comm.recv_obj(comm.rank),
    'refuse': lambda comm: comm.refuse('operation', ValueError()),
    'bad argument': lambda comm: comm.gather(None),
}


@each_case('operation', [*NAMES, *OTHERS])
def test_after_finalize(name, operation):
    own = create_communicator(name)
    own.finalize()
    if operation == 'finalize':
        return  # once more is no error
    with pytest.raises(RuntimeError, match='this communicator was finalized'):
        OTHERS[operation](own) if operation in OTHERS else call(own, operation)


def test_finalize(own, comm, check_usable):
    part = own.split(0, 0)
    own.finalize()
    own.finalize()  # once more is no error
    assert own.rank == comm.rank
    assert own.size == comm.size
    assert own.get_config('batched_copy') is True
    # Others live on, also those that were made from it.
    check_usable(part)
    check_usable(comm)


def test_barrier(own):
    """No rank leaves before all ranks have entered."""
    arrived = own.mpi_comm.Dup()
    flags = np.zeros((own.size, 1), np.uint8)
    requests = [arrived.Irecv(flags[rank], rank) for rank in range(own.size)]
    requests += [arrived.Isend(np.ones(1, np.uint8), rank) for rank in range(own.size)]
    own.barrier()
    time.sleep(.01)
    assert all([request.Test() for request in requests])
    arrived.Free()

