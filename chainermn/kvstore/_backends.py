"""Backends, which send values between workers and servers: one for each kind of store."""
from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn, TypeVar

import chainer
import numpy as np

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.errors import check_equal, raise_on_all_ranks
from chainermn.kvstore._server import Server, sum_arrays
from chainermn.kvstore._sharding import (
    Buffer,
    Entry,
    KeyLayout,
    Rows,
    decode,
    encode,
    join,
    join_shards,
    shard_reads,
    shard_values,
    sum_dtype,
)
from chainermn.kvstore.row_sparse import Array, RowSparse
from chainermn.optimizers.proxy import Named, OptimizerSettings

_T = TypeVar('_T')


class Backend(abc.ABC):
    """One worker's connection to the servers, and the server of its rank.

    Args:
        rank: Rank of this worker and of its server.
        size: Number of workers, which is also the number of servers.
        on_device: Whether arrays are summed and stored on their devices, not in host memory.
    """

    def __init__(self, rank: int, size: int, on_device: bool) -> None:
        self.rank = rank
        self.size = size
        self.on_device = on_device
        self.server: Server = Server(rank)

    @abc.abstractmethod
    def init(self, layouts: Sequence[KeyLayout], values: Sequence[Array]) -> None:
        """Send rank 0's values of new keys to the servers, in shards. Collective."""

    @abc.abstractmethod
    def push(self, layouts: Sequence[KeyLayout], values: Sequence[Array | RowSparse]) -> None:
        """Send one value for each key to the servers, whose updaters merge them."""

    @abc.abstractmethod
    def pull(self, layouts: Sequence[KeyLayout], rows: Sequence[Sequence[Rows]]
             ) -> list[list[Array]]:
        """Return a list of new arrays for each key, one for each element of its ``rows``."""

    def sum_devices(self, layout: KeyLayout, values: Sequence[Array | RowSparse]
                    ) -> Array | RowSparse:
        """Return the sum of the values that were pushed for the devices of this process.

        The sum of several values has the dtype :func:`sum_dtype`. A single array is not copied.
        """
        dtype = sum_dtype(layout.dtype)
        if layout.is_row_sparse and all(isinstance(x, RowSparse) for x in values):
            sparse = [x for x in values if isinstance(x, RowSparse)]
            rows = [chainer.cuda.to_cpu(x.rows).astype(dtype, copy=False) for x in sparse]
            return RowSparse(np.concatenate([x.row_ids for x in sparse]), np.concatenate(rows),
                             layout.shape).unique()
        arrays = [to_dense(x) for x in values]
        device = chainer.backend.get_device_from_array(arrays[0]) if self.on_device \
            else chainer.get_device('@numpy')
        arrays = [device.send(x) for x in arrays]
        return arrays[0] if len(arrays) == 1 else sum_arrays(arrays, dtype)

    @abc.abstractmethod
    def refuse(self, operation: str, error: Exception) -> NoReturn:
        """Raise an error on all ranks that take part in an operation of the store."""

    @abc.abstractmethod
    def check_same(self, operation: str, arguments: str, layouts: Sequence[KeyLayout] = ()
                   ) -> None:
        """Raise ValueError on all ranks if they made different calls. Collective.

        Args:
            operation: Name of the method.
            arguments: Its arguments.
            layouts: The keys to show if other ranks call another operation.
        """

    def comparing(self, settings: OptimizerSettings, named: Named
                  ) -> AbstractContextManager[object]:
        """Return a context in which collective operations compare the settings of an optimizer.

        Args:
            settings: The settings.
            named: All parameters that the optimizer updates, with their paths, in sorted order.
        """
        return nullcontext()

    @abc.abstractmethod
    def gather(self, operation: str, obj: _T) -> list[_T] | None:
        """Return the objects of all ranks on rank 0, and ``None`` elsewhere. Collective."""

    @abc.abstractmethod
    def allgather(self, operation: str, obj: _T) -> list[_T]:
        """Return the objects of all ranks. Collective."""

    @abc.abstractmethod
    def bcast(self, operation: str, obj: _T) -> _T:
        """Return the object of rank 0. Collective."""

    @abc.abstractmethod
    def barrier(self, operation: str) -> None:
        """Wait until all workers have called this method. Collective."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the store for this worker. Its server continues to serve the other workers."""


class LocalBackend(Backend):
    """``local``, ``device`` and ``nccl``: the store of one process."""

    def __init__(self, on_device: bool) -> None:
        super().__init__(0, 1, on_device)

    def init(self, layouts: Sequence[KeyLayout], values: Sequence[Array]) -> None:
        self.server.add_keys(layouts, {
            layout.key_id: x for layout, x in zip(layouts, values, strict=True)})

    def push(self, layouts: Sequence[KeyLayout], values: Sequence[Array | RowSparse]) -> None:
        self.server.update((layout.key_id, [x.todense() if isinstance(x, RowSparse) else x])
                           for layout, x in zip(layouts, values, strict=True))

    def pull(self, layouts: Sequence[KeyLayout], rows: Sequence[Sequence[Rows]]
             ) -> list[list[Array]]:
        return [[self.server.copy(layout.key_id, ids) for ids in reads]
                for layout, reads in zip(layouts, rows, strict=True)]

    def sum_devices(self, layout: KeyLayout, values: Sequence[Array | RowSparse]
                    ) -> Array | RowSparse:
        if self.server.compress is None or layout.dtype.kind != 'f':
            return super().sum_devices(layout, values)
        if len(values) == 1 or (
                layout.is_row_sparse and all(isinstance(x, RowSparse) for x in values)):
            return super().sum_devices(layout, values)
        arrays = [to_dense(x) for x in values]
        target = chainer.backend.get_device_from_array(arrays[0]) if self.on_device \
            else chainer.get_device('@numpy')
        received = []
        for n, x in enumerate(arrays):
            with chainer.using_device(chainer.backend.get_device_from_array(x)):
                compressed = self.server.compress(x.reshape(-1), (layout.key, n))
            with chainer.using_device(target):
                received.append(self.server.decompress(
                    target.send(compressed), x.size, x.dtype).reshape(x.shape))
        return sum_arrays(received, sum_dtype(layout.dtype))

    def refuse(self, operation: str, error: Exception) -> NoReturn:
        raise error

    def check_same(self, operation: str, arguments: str, layouts: Sequence[KeyLayout] = ()
                   ) -> None:
        pass

    def gather(self, operation: str, obj: _T) -> list[_T]:
        return [obj]

    def allgather(self, operation: str, obj: _T) -> list[_T]:
        return [obj]

    def bcast(self, operation: str, obj: _T) -> _T:
        return obj

    def barrier(self, operation: str) -> None:
        pass

    def close(self) -> None:
        pass


class _DistBackend(Backend):
    """A store that all ranks of a communicator share. Each rank is a worker and a server."""

    def __init__(self, communicator: CommunicatorBase, on_device: bool) -> None:
        super().__init__(communicator.rank, communicator.size, on_device)
        self._comm = communicator

    def init(self, layouts: Sequence[KeyLayout], values: Sequence[Array]) -> None:
        messages = None
        if self.rank == 0:
            messages = [join(encode(entries))
                        for entries in shard_values(layouts, values, self.size).values()]
        shards = {}
        with self._called_by('init', layouts):
            received = self._comm.scatter(messages)
            for entry in decode(received):
                n = entry.key_id - layouts[0].key_id
                device = chainer.backend.get_device_from_array(values[n])
                shards[entry.key_id] = device.send(
                    np.array(self.server.values_of(entry, layouts[n])))
            self.server.add_keys(layouts, shards)
            self._comm.barrier()  # no server gets a request before it knows the keys

    def _called_by(self, operation: str, layouts: Sequence[KeyLayout] = ()
                   ) -> AbstractContextManager[object]:
        keys = ', '.join([*(repr(layout.key) for layout in layouts[:3]), *['...'] * (
            len(layouts) > 3)])
        return self._comm.called_by(f'KVStore.{operation} {keys}'.rstrip())

    def refuse(self, operation: str, error: Exception) -> NoReturn:
        self._comm.refuse(f'KVStore.{operation}', error)

    def check_same(self, operation: str, arguments: str, layouts: Sequence[KeyLayout] = ()
                   ) -> None:
        with self._called_by(operation, layouts):
            check_same(self._comm, f'KVStore.{operation}', arguments)

    def gather(self, operation: str, obj: _T) -> list[_T] | None:
        with self._called_by(operation):
            return self._comm.gather_obj(obj)

    def allgather(self, operation: str, obj: _T) -> list[_T]:
        with self._called_by(operation):
            return self._comm.allgather_obj(obj)

    def bcast(self, operation: str, obj: _T) -> _T:
        with self._called_by(operation):
            return self._comm.bcast_obj(obj)

    def barrier(self, operation: str) -> None:
        with self._called_by(operation):
            self._comm.barrier()

    def close(self) -> None:
        pass


class DistSyncBackend(_DistBackend):
    """``dist_sync`` and ``dist_device_sync``: all ranks push together and pull together.

    Each message begins with a digest of the call, so the ranks detect mismatched calls before a
    server updates anything.
    """

    def comparing(self, settings: OptimizerSettings, named: Named
                  ) -> AbstractContextManager[object]:
        if settings.is_compared and self.size > 1:
            settings.compare(named)
        return self._comm.called_by(settings.caller)

    def push(self, layouts: Sequence[KeyLayout], values: Sequence[Array | RowSparse]) -> None:
        entries = shard_values(layouts, values, self.size, self.server.compress)
        received = self._exchange('push', layouts, [encode(one) for one in entries.values()])
        with raise_on_all_ranks(self, 'push'):  # an error of the updater
            self.server.apply(zip(*map(decode, received), strict=True))

    def pull(self, layouts: Sequence[KeyLayout], rows: Sequence[Sequence[Rows]]
             ) -> list[list[Array]]:
        reads = shard_reads(layouts, rows, self.size)
        if all(ids is None for reads_of_key in rows for ids in reads_of_key):
            # All ranks read the same arrays, so a server's reply to its own rank is valid for all.
            digest = _digest('pull', layouts)
            request = join(encode(reads[self.rank]))
            with self._called_by('pull'):
                replies = self._check('pull', layouts, digest, self._comm.allgather(
                    join([digest, *self.server.reply(request)])))
        else:
            requests = self._exchange('row_sparse_pull', layouts, [
                encode(entries) for entries in reads.values()])
            replies = self._exchange('row_sparse_pull', layouts, [
                self.server.reply(request) for request in requests])
        return join_shards(layouts, rows, dict(enumerate(replies)))

    def _exchange(self, operation: str, layouts: Sequence[KeyLayout],
                  messages: Sequence[list[Buffer]]) -> list[np.ndarray]:
        """Send the n-th message to rank n. Return the messages from all ranks."""
        digest = _digest(operation, layouts)
        with self._called_by(operation):
            return self._check(operation, layouts, digest, self._comm.alltoall(
                [join([digest, *message]) for message in messages]))

    def _check(self, operation: str, layouts: Sequence[KeyLayout], digest: bytes,
               received: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return messages without their digests. Raise an error if a digest differs."""
        if any(message[:len(digest)].tobytes() != digest for message in received):
            self.check_same(operation, ', '.join(map(str, layouts)))
        return [message[len(digest):] for message in received]


def _digest(operation: str, layouts: Sequence[KeyLayout]) -> bytes:
    indices = np.array([layout.key_id for layout in layouts], np.int64)
    return hashlib.blake2b(operation.encode() + indices.tobytes(), digest_size=8).digest()


class DistAsyncBackend(_DistBackend):
    """``dist_async``: ranks push and pull at any time, and a thread of each rank replies.

    :meth:`push` and :meth:`pull` are not collective. Their errors are raised on the calling rank.
    """

    def __init__(self, communicator: CommunicatorBase) -> None:
        super().__init__(communicator, on_device=False)
        self._service = communicator.serve(self._serve)

    def push(self, layouts: Sequence[KeyLayout], values: Sequence[Array | RowSparse]) -> None:
        self._ask(_PUSH, shard_values(layouts, values, self.size, self.server.compress))

    def pull(self, layouts: Sequence[KeyLayout], rows: Sequence[Sequence[Rows]]
             ) -> list[list[Array]]:
        replies = self._ask(_PULL, shard_reads(layouts, rows, self.size))
        return join_shards(layouts, rows, replies)

    def _ask(self, operation: bytes, entries: dict[int, list[Entry]]) -> dict[int, np.ndarray]:
        return self._service.ask({server: [operation, *encode(some)]
                                  for server, some in entries.items() if some})

    def _serve(self, source: int, request: np.ndarray) -> list[Buffer]:
        """Reply to a request. Requests of other ranks are handled in the service thread."""
        operation, message = request[:8].tobytes(), request[8:]
        if operation == _PULL:
            return self.server.reply(message)
        self.server.apply([entry] for entry in decode(message))
        return []

    def refuse(self, operation: str, error: Exception) -> NoReturn:
        if operation in ('push', 'pull', 'row_sparse_pull'):
            raise error
        super().refuse(operation, error)

    def close(self) -> None:
        self._service.close()


_PUSH, _PULL = bytes(8), bytes([1, *bytes(7)])  # a request begins with these eight bytes


def to_dense(x: Array | RowSparse) -> Array:
    """Convert to an array. Sum rows with the same index in :func:`sum_dtype`."""
    if not isinstance(x, RowSparse):
        return x
    return RowSparse(x.row_ids, x.rows.astype(sum_dtype(x.dtype)), x.shape).todense()


def check_same(comm: CommunicatorBase, operation: str, arguments: str) -> None:
    """Raise the same ValueError on all ranks if they made different calls. Collective."""
    check_equal(comm, comm.allgather_obj(f'{operation} {arguments}'.rstrip()),
                'KVStore: the ranks made different calls',
                'Make the same calls with the same arguments on all ranks.')
