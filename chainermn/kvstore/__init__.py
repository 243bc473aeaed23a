"""MXNet's KVStore: arrays by key, to which workers push and from which they pull."""
from __future__ import annotations

from chainermn.communicators import create_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.kvstore._dist_async_kvstore import DistAsyncKVStore
from chainermn.kvstore._dist_kvstore import agree
from chainermn.kvstore._dist_sync_kvstore import DistSyncKVStore
from chainermn.kvstore._kvstore import KVStore
from chainermn.kvstore._kvstore_optimizer import create_kvstore_optimizer
from chainermn.kvstore._local_kvstore import LocalKVStore
from chainermn.kvstore._settings import BIGARRAY_BOUND
from chainermn.kvstore.row_sparse import RowSparse

__all__ = ['BIGARRAY_BOUND', 'KVStore', 'RowSparse', 'create', 'create_kvstore_optimizer']

_LOCAL = ('local', 'device', 'nccl')
_DIST = ('dist_sync', 'dist_device_sync', 'dist_async')


def create(name: str = 'local', communicator: CommunicatorBase | None = None, *,
           bigarray_bound: float = BIGARRAY_BOUND) -> KVStore:
    """Makes a store.  Collective for the ``dist`` types: every rank calls it.

    ====================  =========  ===============================================================
    Type                  Shared by  What is pushed
    ====================  =========  ===============================================================
    ``local``             nobody     is summed over the devices of the process on the host, merged
    ``device``, ``nccl``  nobody     the same, but summed and stored on the device of the first
    ``dist_sync``         all ranks  is summed over the ranks too, and merged once: every rank
                                     pushes and pulls the same keys at the same time
    ``dist_device_sync``  all ranks  the same, but stored on the devices
    ``dist_async``        all ranks  is merged when it arrives: no rank waits for another
    ====================  =========  ===============================================================

    In the ``dist`` types each rank is a server as well: the keys go to the ranks in turn, and an
    array of ``bigarray_bound`` elements or more is cut into parts, one for each rank.

    A ``dist_async`` server is a thread, which answers while its rank computes, sleeps or waits,
    and goes on until every rank has closed the store or ended.  So a rank whose training ended by
    an exception that was caught goes on serving the others; one whose process dies ends the job,
    as with MPI in general.

    Args:
        name: The type; the same on all ranks.
        communicator: For the ``dist`` types; by default one of all processes, by MPI on the host.
        bigarray_bound: Number of elements; the same on all ranks.

    Returns:
        The store.

    Raises:
        ValueError: If there is no such type, or, on every rank, the ranks differ.
        RuntimeError: If the MPI library is not made for threads (``dist_async``).
    """
    error: Exception | None = None
    if communicator is not None and not isinstance(communicator, CommunicatorBase):
        raise TypeError(f'communicator has to be a ChainerMN communicator, not {communicator!r}')
    if name not in (*_LOCAL, *_DIST):
        error = ValueError(f'there is no KVStore of type {name!r}; there are '
                           + ', '.join((*_LOCAL, *_DIST)))
    elif isinstance(bigarray_bound, bool) or not isinstance(bigarray_bound, (int, float)) \
            or not bigarray_bound > 0:
        error = ValueError(f'bigarray_bound has to be a positive number, not {bigarray_bound!r}')
    if communicator is None and (error is not None or name in _LOCAL):
        if error is not None:
            raise error
        return LocalKVStore(name, on_device=name != 'local')
    if communicator is None:
        communicator = create_communicator('naive')
    if error is not None:
        communicator.refuse('kvstore.create', error)
    if name in _LOCAL:
        return LocalKVStore(name, on_device=name != 'local')
    agree(communicator, 'kvstore.create', f'{name!r}, bigarray_bound={bigarray_bound}')
    if name == 'dist_async':
        return DistAsyncKVStore(name, communicator, bigarray_bound)
    return DistSyncKVStore(name, communicator, bigarray_bound, name == 'dist_device_sync')

