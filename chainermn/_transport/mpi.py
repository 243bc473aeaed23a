"""What carries flat arrays between the ranks, once they have agreed on the call: here, MPI."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from chainermn._transport import array_buffers
from chainermn._transport.packed_arrays import Pieces

_OPS = {'sum': MPI.SUM, 'prod': MPI.PROD, 'max': MPI.MAX, 'min': MPI.MIN}
_BOOL_OPS = {'sum': MPI.LOR, 'prod': MPI.LAND, 'max': MPI.LOR, 'min': MPI.LAND}


#: Bytes from which on a way with more steps but less copying is faster.
LARGE = 64 * 1024


class MpiTransport:
    """The collectives of MPI.  Arrays on a device go through the host, or as they are.

    Args:
        mpi_comm: The ranks.  Nothing else may use its messages meanwhile.
    """

    def __init__(self, mpi_comm: Any) -> None:
        self._mpi_comm = mpi_comm

    def bcast(self, x: Any, shape: tuple[int, ...], dtype: np.dtype, device: bool, root: int
              ) -> Any:
        """The root's array, of that shape and dtype; on the root ``x``."""
        if self._mpi_comm.rank == root:
            self._mpi_comm.Bcast(array_buffers.raw(array_buffers.to_buffer(x)), root)
            return x
        buffer = array_buffers.new_buffer(shape, dtype, device)
        self._mpi_comm.Bcast(array_buffers.raw(buffer), root)
        return array_buffers.from_buffer(buffer, shape, device)

    def gather(self, x: Any, shapes: Sequence[tuple[int, ...]], root: int
               ) -> tuple[Any, ...] | None:
        """The arrays of all ranks, which have those shapes, on the root; ``None`` elsewhere."""
        sent, are_alike = array_buffers.raw(array_buffers.to_buffer(x)), len(set(shapes)) == 1
        if self._mpi_comm.rank != root:
            (self._mpi_comm.Gather if are_alike else self._mpi_comm.Gatherv)(sent, None, root)
            return None
        received = Pieces(shapes, x.dtype, array_buffers.on_device(x))
        if are_alike:
            self._mpi_comm.Gather(sent, received.raw, root)
        else:
            self._mpi_comm.Gatherv(sent, received.spec, root)
        return received.arrays()

    def scatter(self, xs: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype, device: bool,
                are_alike: bool, root: int) -> Any:
        """This rank's array, of that shape and dtype, of those that the root has.

        Elsewhere ``xs`` is empty.  ``are_alike`` says whether all have one shape.
        """
        scatter = self._mpi_comm.Scatter if are_alike else self._mpi_comm.Scatterv
        if self._mpi_comm.rank == root:
            sent = Pieces.of(xs)
            scatter(sent.raw if are_alike else sent.spec, MPI.IN_PLACE, root)
            return xs[root].copy()
        buffer = array_buffers.new_buffer(shape, dtype, device)
        scatter(None, array_buffers.raw(buffer), root)
        return array_buffers.from_buffer(buffer, shape, device)

    def alltoall(self, xs: Sequence[Any], shapes: Sequence[tuple[int, ...]], are_alike: bool
                 ) -> tuple[Any, ...]:
        """The arrays that the ranks have for this one, of those shapes.

        ``are_alike`` says whether all of all ranks have one shape.
        """
        sent = Pieces.of(xs)
        received = Pieces(shapes, xs[0].dtype, array_buffers.on_device(xs[0]))
        if are_alike:
            self._mpi_comm.Alltoall(sent.raw, received.raw)
        else:
            self._mpi_comm.Alltoallv(sent.spec, received.spec)
        return received.arrays()

    def allgather(self, x: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
        """The arrays of all ranks, which have those shapes."""
        sent = array_buffers.raw(array_buffers.to_buffer(x))
        received = Pieces(shapes, x.dtype, array_buffers.on_device(x))
        if received.are_alike:
            self._mpi_comm.Allgather(sent, received.raw)
        else:
            self._mpi_comm.Allgatherv(sent, received.spec)
        return received.arrays()

    def allreduce(self, x: Any, op: str, out: Any = None) -> Any:
        """The arrays, combined, on every rank.

        They are in ``out`` if that is a C-ordered host array of the right dtype, which is ``x``
        itself or apart from it.
        """
        if type(x) is np.ndarray and x.flags.c_contiguous:
            y = np.empty(x.shape, x.dtype) if out is None or out.dtype != x.dtype else out
            source = MPI.IN_PLACE if out is not None and np.may_share_memory(x, y) else x
            self._mpi_comm.Allreduce(source, y, _op(x, op))
            return y
        y = _new(x.size, x)
        self._mpi_comm.Allreduce(array_buffers.to_buffer(x), y, _op(x, op))
        return array_buffers.from_buffer(y, x.shape, array_buffers.on_device(x))

    def sums(self, xs: Sequence[Any]) -> list[Any] | None:
        """The sums of several arrays; ``None`` where they had better be packed into one."""
        return None

    def reduce(self, x: Any, op: str, root: int) -> Any:
        """The arrays, combined, on the root; ``None`` elsewhere."""
        y = _new(x.size, x) if self._mpi_comm.rank == root else None
        self._mpi_comm.Reduce(array_buffers.to_buffer(x), y, _op(x, op), root)
        if y is None:
            return None
        return array_buffers.from_buffer(y, x.shape, array_buffers.on_device(x))

    def reduce_scatter(self, x: Any, op: str, sizes: Sequence[int]) -> Any:
        """This rank's piece of the flat arrays, combined; there is one of that size for each."""
        y = _new(sizes[self._mpi_comm.rank], x)
        self._mpi_comm.Reduce_scatter(array_buffers.to_buffer(x), y, sizes, _op(x, op))
        return array_buffers.from_buffer(y, y.shape, array_buffers.on_device(x))


def _new(size: int, x: Any) -> Any:
    return array_buffers.new_buffer((size,), x.dtype, array_buffers.on_device(x))


def _op(x: Any, op: str) -> MPI.Op:
    return (_BOOL_OPS if x.dtype == np.bool_ else _OPS)[op]
