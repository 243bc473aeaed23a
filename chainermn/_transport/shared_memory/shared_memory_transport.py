"""The shared memory transport, which sums all host arrays of a dtype together."""
from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from chainermn._transport import array_buffers
from chainermn._transport.array_list import ArrayList
from chainermn._transport.base import Codec, Group, SlicedCompressor
from chainermn._transport.mpi_transport import LARGE, MpiTransport
from chainermn._transport.shared_memory import shared_sums
from chainermn._transport.shared_memory.shared_sums import SharedMemory
from chainermn._types import Array

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_nbytes_of = operator.attrgetter('nbytes')


class SharedMemoryTransport(MpiTransport):
    """Sums host arrays in shared memory within each node and with MPI between nodes.

    MPI also transfers small arrays, arrays on a device, and all arrays if no shared memory is
    available.

    Example:
        >>> from mpi4py import MPI
        >>> from chainermn.communicators import mpi_communicator_base, transport
        >>> class MyCommunicator(mpi_communicator_base.MpiCommunicatorBase):
        ...     transport_class = transport.SharedMemoryTransport
        >>> comm = MyCommunicator(MPI.COMM_WORLD)
    """

    allows_mixed_devices: ClassVar[bool] = False

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._shared: SharedMemory | None = None
        self._largest = -1  # bytes of the largest transfer for which this memory is used
        self._waits_passively = False

    def carries(self, on_device: bool) -> bool:
        return not on_device and self.size > 1

    def connect(self) -> None:
        if self._largest < sys.maxsize:
            self._allocate(shared_sums.chunk_size(self.group.topology))

    def set_passive_wait(self, passive: bool) -> None:
        self._waits_passively = passive
        if self._shared is not None:
            self._shared.set_passive_wait(passive)

    def free(self) -> None:
        if self._shared is not None:
            self._shared.free()

    def groups(self, arrays: ArrayList, results: Sequence[Array] | None
               ) -> Sequence[tuple[Sequence[Array], Sequence[Array]]]:
        return arrays.by_dtype(results)

    def mean(self, arrays: ArrayList, results: Sequence[Array] | None = None) -> None:
        if self.size == 1 and results is None:
            return
        if arrays.on_host and len(arrays.dtypes) == 1:  # usually there is a single group
            groups = [(arrays, arrays if results is None else results)]
        else:
            groups = arrays.by_dtype(results)
        for group, targets in groups:
            if group.on_device or (memory := self._memory(group)) is None:
                self._packed_mean(group, targets)
            else:
                memory.sum(group, targets, scale=1 / self.size)

    def mean_for_owners(self, arrays: ArrayList, owners: tuple[int, ...]) -> None:
        if type(self).mean is not SharedMemoryTransport.mean:
            self.mean(arrays)
            return
        for group, of_group in arrays.by_owner(owners):
            if group.on_device or (memory := self._memory(group)) is None:
                self._mean_for_owners(group, tuple(of_group))
            else:
                memory.sum_for_owners(group, tuple(of_group), scale=1 / self.size)

    def mean_compressed(self, arrays: ArrayList, results: Sequence[Array] | None, codec: Codec
                        ) -> None:
        """Average in shared memory within each node, and send encoded means between nodes.

        On a single node, MPI averages the encoded arrays of all ranks, so that compression rounds
        the values there as well.
        """
        compressor = codec.compressor
        if self.group.topology.inter_size == 1 or not arrays.on_host or (
                not isinstance(compressor, SlicedCompressor)) or (
                memory := self._memory(arrays)) is None:
            super().mean_compressed(arrays, results, codec)
            return
        for n, (group, targets) in enumerate(arrays.by_dtype(results)):
            memory.mean_encoded(group, targets, codec, compressor, f'{codec.name}.{n}')

    def bcast_arrays(self, arrays: ArrayList, root: int = 0) -> None:
        if self.size == 1:
            return
        if not arrays.on_host or (memory := self._memory(arrays)) is None:
            super().bcast_arrays(arrays, root)
        else:
            memory.copy(arrays, (root,) * len(arrays))

    def copy_arrays(self, arrays: ArrayList, owners: tuple[int, ...]) -> None:
        if not arrays.on_host or self.size == 1 or (memory := self._memory(arrays)) is None:
            self._copy_arrays(arrays, owners)
        else:
            memory.copy(arrays, owners)

    def bcast(self, x: Array | None, shape: tuple[int, ...], dtype: np.dtype, on_device: bool,
              root: int) -> Array:
        if on_device or dtype.itemsize * math.prod(shape) < LARGE:
            return super().bcast(x, shape, dtype, on_device, root)
        y = self.group.prepared(dtype.itemsize * math.prod(shape), lambda: (
            np.empty(shape, dtype) if x is None else array_buffers.contiguous(x)))
        if (memory := self._memory([y])) is None:
            return super().bcast(x, shape, dtype, on_device, root)
        memory.copy([y.reshape(-1)], (root,))
        return y if x is None else x

    def allreduce(self, x: Array, op: str, out: Array | None = None) -> Array:
        if op != 'sum' or x.nbytes < LARGE or x.dtype not in _FLOATS or (
                memory := self._memory([x])) is None:
            return super().allreduce(x, op, out)
        sent, y = self.group.prepared(x.nbytes, lambda: (
            x if out is x else array_buffers.contiguous(x),
            np.empty(x.shape, x.dtype) if out is None or out.dtype != x.dtype else out))
        memory.sum(ArrayList.of([sent]), None if y is sent else [y])
        return y

    def sums(self, xs: ArrayList) -> list[Array] | None:
        if len(xs.dtypes) > 1 or xs.dtypes[0] not in _FLOATS or (
                sum(x.nbytes for x in xs) < LARGE) or (memory := self._memory(xs)) is None:
            return None
        sent, ys = self.group.prepared(sum(x.nbytes for x in xs), lambda: (
            ArrayList.of(map(array_buffers.contiguous, xs)),
            [np.empty(x.shape, x.dtype) for x in xs]))
        memory.sum(sent, ys)
        return ys

    def _memory(self, arrays: Sequence[Array]) -> SharedMemory | None:
        """Return the shared memory for a transfer; ``None`` if it is unavailable.

        The first transfer allocates the memory. The first transfer that is not small allocates it
        again, for larger chunks.

        Args:
            arrays: The arrays. Their sizes are the same on all ranks.
        """
        if self._largest < sys.maxsize and (
                size := sum(map(_nbytes_of, arrays))) > self._largest:
            self._allocate(shared_sums.chunk_size(self.group.topology, size))
        return self._shared

    def _allocate(self, chunk: int) -> None:
        if self._shared is not None:
            self._shared.free()
        self._shared = shared_sums.create(self.mpi_comm, self.group.topology, chunk)
        is_small = self._shared is not None and chunk == shared_sums.SMALL_CHUNK
        self._largest = shared_sums.SMALL_EXCHANGE if is_small else sys.maxsize
        self.set_passive_wait(self._waits_passively)
