"""The MPI-based transport, from which all others derive."""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers, encoded_mean, owned_arrays, packing
from chainermn._transport.array_list import ArrayList, small_together
from chainermn._transport.base import Codec, Group
from chainermn._transport.packing import PackedArrays
from chainermn._types import Array

_FLOATS = {np.dtype(np.float32), np.dtype(np.float64)}

#: The size in bytes from which shared memory is faster: it takes more steps, but copies less.
LARGE = 64 * 1024

#: The maximum size in bytes of an array that is sent together with others.
_SMALL = 16 * 1024


class MpiTransport:
    """Moves arrays between the ranks of a communicator, after the consistency check.

    It uses MPI for arrays on the host and on devices, with one all-reduce for each large gradient
    and for each group of small gradients. Arrays on a device are staged on the host unless MPI is
    CUDA-aware.

    To write a custom transport, derive it from this class and override the methods that it can make
    faster; often, :meth:`mean` is enough.

    Example:
        >>> from mpi4py import MPI
        >>> from chainermn.communicators import mpi_communicator_base, transport
        >>> class SumTransport(transport.MpiTransport):
        ...     def mean(self, arrays, results=None):
        ...         super().mean(arrays, results)
        ...         for y in arrays if results is None else results:
        ...             y *= self.size
        >>> class SumCommunicator(mpi_communicator_base.MpiCommunicatorBase):
        ...     transport_class = SumTransport
        >>> comm = SumCommunicator(MPI.COMM_WORLD)
    """

    #: Whether gradients are averaged over the ranks; otherwise, debug mode checks nothing.
    averages: ClassVar[bool] = True
    #: Whether models must be on a device; see :meth:`requirements`.
    needs_device: ClassVar[bool] = False
    #: Whether a model may be on a device on some ranks and on the host on others.
    allows_mixed_devices: ClassVar[bool] = True
    #: Whether gradients on a device are averaged in the background, so that double buffering helps.
    can_overlap: ClassVar[bool] = False
    #: Whether NCCL sends the arrays that are on a device.
    has_nccl: ClassVar[bool] = False

    def __init__(self, group: Group) -> None:
        self.group = group
        self.mpi_comm: MPI.Intracomm = group.mpi_comm
        self.rank: int = group.mpi_comm.rank
        self.size: int = group.mpi_comm.size

    def carries(self, on_device: bool) -> bool:
        """Return whether the methods for single arrays accept arrays on a device, or on the host.

        All other arrays are sent by MPI, and so are arrays that are on a device on some ranks only.
        """
        return True

    def requirements(self, paths: Sequence[str], arrays: ArrayList, for_mean: bool
                     ) -> dict[str, str]:
        """Check the arrays of a model that must be on a device, before they are sent.

        Args:
            paths: The path of each array.
            arrays: Parameters or gradients.
            for_mean: Whether they will be averaged.

        Returns:
            Properties besides paths, dtypes and shapes that must be the same on all ranks, by name.

        Raises:
            TypeError, ValueError: If this transport cannot send one of the arrays.
        """
        return {}

    def connect(self) -> None:
        """Allocate resources now instead of in the first operation. MPI needs none.

        Collective: every rank calls it.
        """

    def set_passive_wait(self, passive: bool) -> None:
        """Select how to wait for other ranks: passively, or by polling continuously.

        With MPI, the library decides, so this has no effect.
        """

    def free(self) -> None:
        """Free all resources. Collective: every rank calls it, once.

        The communicator frees its MPI communicators.
        """

    # --- models --------------------------------------------------------------------------------

    def groups(self, arrays: ArrayList, results: Sequence[Array] | None
               ) -> Sequence[tuple[Sequence[Array], Sequence[Array]]]:
        """Group arrays of one dtype that share a buffer. The groups are the same on all ranks."""
        return [([x], [y]) for x, y in zip(
            arrays, arrays if results is None else results, strict=True)]

    def mean(self, arrays: ArrayList, results: Sequence[Array] | None = None) -> None:
        """Average arrays over all ranks. Collective: every rank calls it.

        Args:
            arrays: Floating-point arrays, of the same dtypes and shapes on all ranks.
            results: Arrays for the means, or ``None`` for ``arrays`` themselves. If it is not
                ``None``, ``arrays`` do not change.
        """
        for group, targets in self._messages(arrays, results):
            self._packed_mean(group, targets)

    def mean_for_owners(self, arrays: ArrayList, owners: tuple[int, ...]) -> None:
        """Average each array over all ranks, for its owner. Collective: every rank calls it.

        In a transport that overrides only :meth:`mean`, all ranks get the means.

        Args:
            arrays: Same as for :meth:`mean`. They are averaged in place; on ranks other than the
                owner, the values are undefined.
            owners: The rank that needs each array. Arrays of the same owner are adjacent.
        """
        if type(self).mean is not MpiTransport.mean:
            self.mean(arrays)
            return
        self._mean_for_owners(arrays, owners)

    def _mean_for_owners(self, arrays: ArrayList, owners: tuple[int, ...]) -> None:
        if owned_arrays.sends_least(self.group.topology):
            owned_arrays.average(self.mpi_comm, self.group, arrays, owners)
        else:
            self.mean(arrays)

    def _packed_mean(self, group: Sequence[Array], targets: Sequence[Array]) -> None:
        """Average arrays of one dtype in one buffer."""
        x, batched = group[0], self.group.batched_copy
        is_in_place = len(group) == 1 and targets[0] is x and type(x) is np.ndarray and (
            x.dtype in _FLOATS and array_buffers.is_direct(x))

        def pack() -> Array:
            if is_in_place:
                return x
            buffer = packing.pack(group, array_buffers.summed_in(x.dtype), batched)
            # The buffer is summed in place, but the array itself must not change.
            return self._staged(
                buffer.copy() if len(group) == 1 and targets[0] is not x else buffer)

        buffer = self.group.prepared(sum(x.nbytes for x in group), pack)
        if is_in_place:
            self.mpi_comm.Allreduce(MPI.IN_PLACE, x)
            np.multiply(x, 1 / self.size, out=x)
        else:
            total = self._sum(buffer, array_buffers.on_device(x))
            packing.unpack(total, targets, 1 / self.size, batched)

    def _staged(self, buffer: Array) -> Array:
        """Return a flat buffer for :meth:`_sum`."""
        return array_buffers.to_buffer(buffer)

    def _sum(self, staged: Array, on_device: bool) -> Array:
        """Return the sum of the flat buffers of all ranks. This may overwrite the buffer."""
        self.mpi_comm.Allreduce(MPI.IN_PLACE, staged)
        return array_buffers.from_buffer(staged, staged.shape, on_device)

    def mean_compressed(self, arrays: ArrayList, results: Sequence[Array] | None, codec: Codec
                        ) -> None:
        """Like :meth:`mean`, but only encoded arrays are sent.

        Collective: every rank calls it.
        """
        batched = self.group.batched_copy
        groups = self.groups(arrays, results)
        buffers = self.group.prepared(sum(x.nbytes for x in arrays), lambda: [
            packing.pack(group, array_buffers.summed_in(group[0].dtype), batched)
            for group, _ in groups])
        encoded = codec.encode(buffers, [group for group, _ in groups])
        for (_, targets), buffer, one in zip(groups, buffers, encoded, strict=True):
            mean = self._mean_encoded(codec, one, buffer.size, buffer.dtype)
            packing.unpack(mean, targets, 1, batched)

    def _mean_encoded(self, codec: Codec, encoded: Array, size: int, dtype: np.dtype) -> Array:
        """Return the mean of the encoded buffers of all ranks."""
        return encoded_mean.by_mpi(
            self.mpi_comm, codec, encoded, size, dtype, self.group.prepared)

    def bcast_arrays(self, arrays: ArrayList, root: int = 0) -> None:
        """Copy the arrays from the root to all ranks.

        Collective: every rank calls it.
        """
        for group, _ in self._messages(arrays, None):
            self._packed_bcast(group, root)

    def copy_arrays(self, arrays: ArrayList, owners: tuple[int, ...]) -> None:
        """Copy each array from its owner to all ranks. Collective: every rank calls it.

        Args:
            arrays: Arrays of the same dtypes and shapes on all ranks.
            owners: The rank with the data of each array. Arrays of the same owner are adjacent.
        """
        if type(self).bcast_arrays is MpiTransport.bcast_arrays:
            self._copy_arrays(arrays, owners)
        else:
            self._copy_one_by_one(arrays, owners)

    def _copy_one_by_one(self, arrays: ArrayList, owners: tuple[int, ...]) -> None:
        for root, numbers in itertools.groupby(range(len(arrays)), owners.__getitem__):
            self.bcast_arrays(ArrayList.of(arrays[number] for number in numbers), root)

    def _copy_arrays(self, arrays: ArrayList, owners: tuple[int, ...]) -> None:
        if owned_arrays.sends_least(self.group.topology):
            owned_arrays.copy(self.group, arrays, owners)
        else:
            self._copy_one_by_one(arrays, owners)

    def _messages(self, arrays: ArrayList, results: Sequence[Array] | None
                  ) -> Sequence[tuple[Sequence[Array], Sequence[Array]]]:
        """Return the groups. If each has one array, combine small host arrays of one dtype.

        Copying such arrays takes less time than sending them one by one.
        """
        groups = self.groups(arrays, results)
        if len(groups) < len(arrays):
            return groups
        return small_together(arrays, arrays if results is None else results, _SMALL, LARGE)

    def _packed_bcast(self, group: Sequence[Array], root: int) -> None:
        """Broadcast arrays of one dtype in one buffer."""
        shape, device = (sum(array.size for array in group),), array_buffers.on_device(group[0])
        buffer = self.group.prepared(sum(array.nbytes for array in group), lambda: (
            array_buffers.to_buffer(packing.pack(group)) if self.rank == root else
            array_buffers.new_buffer(shape, group[0].dtype, device)))
        self.mpi_comm.Bcast(array_buffers.raw(buffer), root)
        if self.rank != root:
            packing.unpack(array_buffers.from_buffer(buffer, shape, device), group)

    # --- single arrays -------------------------------------------------------------------------

    def bcast(self, x: Array, shape: tuple[int, ...], dtype: np.dtype, on_device: bool, root: int
              ) -> Array:
        """Return the root's array, of the given shape and dtype; on the root, return ``x``."""
        buffer = self.group.prepared(dtype.itemsize * math.prod(shape), lambda: (
            array_buffers.to_buffer(x) if self.rank == root else
            array_buffers.new_buffer(shape, dtype, on_device)))
        self.mpi_comm.Bcast(array_buffers.raw(buffer), root)
        return x if self.rank == root else array_buffers.from_buffer(buffer, shape, on_device)

    def gather(self, x: Array, shapes: Sequence[tuple[int, ...]], root: int
               ) -> tuple[Array, ...] | None:
        """Return the arrays of all ranks on the root, ``None`` on the others."""
        sent, received = self._gathered(x, shapes, self.rank == root)
        if len(set(shapes)) == 1:
            self.mpi_comm.Gather(sent, None if received is None else received.raw, root)
        else:
            self.mpi_comm.Gatherv(sent, None if received is None else received.spec, root)
        return None if received is None else received.arrays()

    def _gathered(self, x: Array, shapes: Sequence[tuple[int, ...]], is_receiver: bool
                  ) -> tuple[Array, PackedArrays | None]:
        """Return the buffer to send, and memory for the arrays of all ranks."""
        return self.group.prepared(x.dtype.itemsize * sum(map(math.prod, shapes)), lambda: (
            array_buffers.raw(array_buffers.to_buffer(x)),
            PackedArrays(shapes, x.dtype, array_buffers.on_device(x)) if is_receiver else None))

    def scatter(self, xs: Sequence[Array], shape: tuple[int, ...], dtype: np.dtype,
                on_device: bool, homogeneous: bool, root: int) -> Array:
        """Return the root's array for this rank, of the given shape and dtype.

        ``xs`` is empty on the other ranks. ``homogeneous`` means that all arrays have the same
        shape.
        """
        scatter = self.mpi_comm.Scatter if homogeneous else self.mpi_comm.Scatterv
        nbytes = dtype.itemsize * math.prod(shape) * self.size if homogeneous else None
        if self.rank == root:
            sent, own = self.group.prepared(
                nbytes, lambda: (PackedArrays.of(xs), xs[root].copy()))
            scatter(sent.raw if homogeneous else sent.spec, MPI.IN_PLACE, root)
            return own
        buffer = self.group.prepared(
            nbytes, lambda: array_buffers.new_buffer(shape, dtype, on_device))
        scatter(None, array_buffers.raw(buffer), root)
        return array_buffers.from_buffer(buffer, shape, on_device)

    def alltoall(self, xs: Sequence[Array], shapes: Sequence[tuple[int, ...]], homogeneous: bool
                 ) -> tuple[Array, ...]:
        """Return each rank's array for this rank, of the given shapes.

        ``homogeneous`` means that all arrays on all ranks have the same shape.
        """
        x = xs[0]
        nbytes = x.nbytes * self.size if homogeneous else None
        sent, received = self.group.prepared(nbytes, lambda: (
            PackedArrays.of(xs), PackedArrays(shapes, x.dtype, array_buffers.on_device(x))))
        if homogeneous:
            self.mpi_comm.Alltoall(sent.raw, received.raw)
        else:
            self.mpi_comm.Alltoallv(sent.spec, received.spec)
        return received.arrays()

    def allgather(self, x: Array, shapes: Sequence[tuple[int, ...]]) -> tuple[Array, ...]:
        """Return the arrays of all ranks, of the given shapes."""
        sent, received = self._gathered(x, shapes, True)
        assert received is not None
        if received.homogeneous:
            self.mpi_comm.Allgather(sent, received.raw)
        else:
            self.mpi_comm.Allgatherv(sent, received.spec)
        return received.arrays()

    def allreduce(self, x: Array, op: str, out: Array | None = None) -> Array:
        """Return the reduction of the arrays of all ranks.

        The result is in ``out`` if that is a C-ordered host array of the right dtype. ``out`` must
        be ``x`` itself, or an array that shares no memory with ``x``.
        """
        if type(x) is np.ndarray and array_buffers.is_direct(x):
            y = self.group.prepared(x.nbytes, lambda: (
                np.empty(x.shape, x.dtype) if out is None or out.dtype != x.dtype else out))
            source = MPI.IN_PLACE if out is not None and np.may_share_memory(x, y) else x
            self.mpi_comm.Allreduce(source, y, mpi_op(x.dtype, op))
            return y
        sent, y = self.group.prepared(
            x.nbytes, lambda: (array_buffers.to_buffer(x), _new(x.size, x)))
        self.mpi_comm.Allreduce(sent, y, mpi_op(x.dtype, op))
        return array_buffers.from_buffer(y, x.shape, array_buffers.on_device(x))

    def sums(self, xs: ArrayList) -> list[Array] | None:
        """Return the sums of several arrays; ``None`` where packing them is faster."""
        return None

    def reduce(self, x: Array, op: str, root: int) -> Array | None:
        """Return the reduction of the arrays of all ranks on the root, ``None`` on the others."""
        sent, y = self.group.prepared(x.nbytes, lambda: (
            array_buffers.to_buffer(x), _new(x.size, x) if self.rank == root else None))
        self.mpi_comm.Reduce(sent, y, mpi_op(x.dtype, op), root)
        if y is None:
            return None
        return array_buffers.from_buffer(y, x.shape, array_buffers.on_device(x))

    def reduce_scatter(self, x: Array, op: str, sizes: Sequence[int]) -> Array:
        """Reduce flat arrays and return this rank's part. ``sizes`` has the size of each part."""
        sent, y = self.group.prepared(
            x.nbytes, lambda: (array_buffers.to_buffer(x), _new(sizes[self.rank], x)))
        self.mpi_comm.Reduce_scatter(sent, y, sizes, mpi_op(x.dtype, op))
        return array_buffers.from_buffer(y, y.shape, array_buffers.on_device(x))


def _new(size: int, x: Array) -> Array:
    return array_buffers.new_buffer((size,), x.dtype, array_buffers.on_device(x))


@functools.cache
def mpi_op(dtype: np.dtype, op: str) -> MPI.Op:
    """Return the MPI operation for arrays of a dtype."""
    if dtype == np.bool_:
        return {'sum': MPI.LOR, 'prod': MPI.LAND, 'max': MPI.LOR, 'min': MPI.LAND}[op]
    return {'sum': MPI.SUM, 'prod': MPI.PROD, 'max': MPI.MAX, 'min': MPI.MIN}[op]

