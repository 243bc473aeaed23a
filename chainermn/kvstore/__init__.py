"""MXNet's KVStore: a key-value store of arrays that workers push to and pull from."""
from __future__ import annotations

import numbers
from typing import Literal

from chainermn.communicators import as_communicator, create_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.kvstore._backends import (
    Backend,
    DistAsyncBackend,
    DistSyncBackend,
    LocalBackend,
    check_same,
)
from chainermn.kvstore._kvstore import KVStore, StoreType
from chainermn.kvstore._kvstore_optimizer import create_kvstore_optimizer
from chainermn.kvstore.row_sparse import RowSparse

__all__ = ['BIGARRAY_BOUND', 'KVStore', 'RowSparse', 'create', 'create_kvstore_optimizer']

#: Arrays with at least this many elements are split into shards, one for each server.
BIGARRAY_BOUND = 1_000_000

_LOCAL = ('local', 'device', 'nccl')
_DIST = ('dist_sync', 'dist_device_sync', 'dist_async')
#: Alternative names that MXNet has for these types.
_ALIASES: dict[str, StoreType] = {'dist': 'dist_sync', 'dist_sync_device': 'dist_device_sync'}


def create(name: StoreType | Literal['dist', 'dist_sync_device'] = 'local',
           communicator: CommunicatorBase | None = None, *,
           bigarray_bound: float = BIGARRAY_BOUND) -> KVStore:
    """Create a store. Collective for the ``dist`` types: every rank calls it.

    ====================  =========  ===============================================================
    Type                  Shared by  Effect of a push
    ====================  =========  ===============================================================
    ``local``             one rank   sums the values of the devices of this process in host memory
                                     and calls the updater with the sum
    ``device``, ``nccl``  one rank   same as ``local``, but sums on the device of the first value;
                                     stored arrays stay on their devices
    ``dist_sync``         all ranks  same as ``local``, but also sums over all ranks; every rank
                                     pushes and pulls the same keys at the same time
    ``dist_device_sync``  all ranks  same as ``dist_sync``, but stored arrays stay on their devices
    ``dist_async``        all ranks  calls the updater with this rank's value when it arrives; no
                                     rank waits for another
    ====================  =========  ===============================================================

    In the ``dist`` types, each rank is a worker and a server. Keys are assigned to the servers in
    turn. Arrays with at least ``bigarray_bound`` elements are split into shards, one for each
    server.

    A ``dist_async`` server is a thread. It replies while its rank computes, sleeps or waits, and
    runs until every rank has closed the store or exited. So if an exception ends the training loop
    of a rank and is caught, the rank still serves the others. If a process dies, the whole job
    aborts.

    Args:
        name: The type; the same on all ranks. As in MXNet, ``dist`` is ``dist_sync``, and
            ``dist_sync_device`` is ``dist_device_sync``.
        communicator: Communicator for the ``dist`` types; the same on all ranks. By default, a
            ``naive`` communicator with all processes.
        bigarray_bound: Number of elements from which arrays are split into shards; a positive
            number, the same on all ranks.

    Returns:
        The store.

    Raises:
        TypeError: If ``communicator`` is not a ChainerMN communicator.
        ValueError: If ``name`` is unknown, ``bigarray_bound`` is not a positive number, or the
            arguments differ between ranks. All ranks raise the error if the type is a ``dist`` type
            or ``communicator`` is given.
        RuntimeError: If the MPI library cannot be called from several threads (``dist_async``).

    Example:
        >>> store = chainermn.kvstore.create('dist_sync', comm)
        >>> store.init('w', np.zeros(3))
        >>> store.push('w', np.full(3, comm.rank + 1.0))
        >>> store.pull('w')
        array([3., 3., 3.])
    """
    if communicator is not None:
        communicator = as_communicator(communicator, 'kvstore.create(name, communicator)')
    name = _ALIASES.get(name, name) if isinstance(name, str) else name
    if communicator is None and name in _DIST:
        communicator = create_communicator('naive')
    try:
        if name not in (*_LOCAL, *_DIST):
            raise ValueError(f'unknown KVStore type {name!r}; choose one of '
                             + ', '.join((*_LOCAL, *_DIST)))
        if isinstance(bigarray_bound, bool) or not isinstance(bigarray_bound, numbers.Real) \
                or not bigarray_bound > 0:
            raise ValueError(f'bigarray_bound must be a positive number, not {bigarray_bound!r}')
    except ValueError as error:
        if communicator is None:
            raise
        communicator.refuse('kvstore.create', error)
    if communicator is None or name in _LOCAL:
        return KVStore(name, LocalBackend(on_device=name != 'local'), float('inf'))
    with communicator.called_by('kvstore.create'):
        check_same(communicator, 'kvstore.create', f'{name!r}, bigarray_bound={bigarray_bound}')
    backend: Backend = DistAsyncBackend(communicator) if name == 'dist_async' else \
        DistSyncBackend(communicator, on_device=name == 'dist_device_sync')
    return KVStore(name, backend, bigarray_bound)
