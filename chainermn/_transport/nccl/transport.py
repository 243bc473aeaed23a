"""NCCL carries arrays on a device, on the current stream; MPI what NCCL cannot."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from chainermn._transport.mpi import MpiTransport
from chainermn._transport.nccl.connection import NcclGroup


class NcclTransport(MpiTransport):
    """The collectives of NCCL, for arrays on a device on all ranks.

    Args:
        mpi_comm: The ranks.  Nothing else may use its messages meanwhile.
        group: NCCL among the same ranks.
    """

    def __init__(self, mpi_comm: Any, group: NcclGroup) -> None:
        super().__init__(mpi_comm)
        self._group = group

    def bcast(self, x: Any, shape: tuple[int, ...], dtype: np.dtype, device: bool, root: int
              ) -> Any:
        import cupy

        self._group.connect()
        if self._mpi_comm.rank == root:
            self._group.bcast(cupy.ascontiguousarray(x).reshape(-1), root)
            return x
        y = cupy.empty(shape, dtype)
        self._group.bcast(y.reshape(-1), root)
        return y

    def gather(self, x: Any, shapes: Sequence[tuple[int, ...]], root: int
               ) -> tuple[Any, ...] | None:
        if self._mpi_comm.rank != root:
            self._exchange({root: x}, {})
            return None
        return self._exchange({root: x}, dict(enumerate(shapes)))

    def scatter(self, xs: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype, device: bool,
                are_alike: bool, root: int) -> Any:
        y, = self._exchange(dict(enumerate(xs)), {root: shape}, dtype)
        return y

    def alltoall(self, xs: Sequence[Any], shapes: Sequence[tuple[int, ...]], are_alike: bool
                 ) -> tuple[Any, ...]:
        return self._exchange(dict(enumerate(xs)), dict(enumerate(shapes)))

    def allgather(self, x: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
        if len(set(shapes)) > 1:
            return super().allgather(x, shapes)
        import cupy

        self._group.connect()
        y = cupy.empty((len(shapes), *x.shape), x.dtype)
        self._group.all_gather(cupy.ascontiguousarray(x).reshape(-1), y.reshape(-1))
        return tuple(y)

    def allreduce(self, x: Any, op: str, out: Any = None) -> Any:
        if not self._group.combines(x.dtype):
            return super().allreduce(x, op, out)
        self._group.connect()
        y = x.copy('C')
        self._group.all_reduce(y, op)
        return y

    def reduce(self, x: Any, op: str, root: int) -> Any:
        if not self._group.combines(x.dtype):
            return super().reduce(x, op, root)
        self._group.connect()
        y = x.copy('C')
        self._group.reduce(y, op, root)
        return y if self._mpi_comm.rank == root else None

    def reduce_scatter(self, x: Any, op: str, sizes: Sequence[int]) -> Any:
        if not self._group.combines(x.dtype) or len(set(sizes)) > 1:
            return super().reduce_scatter(x, op, sizes)
        import cupy

        self._group.connect()
        y = cupy.empty(sizes[0], x.dtype)
        self._group.reduce_scatter(x, y, op)
        return y

    def _exchange(self, xs: dict[int, Any], shapes: dict[int, tuple[int, ...]],
                  dtype: np.dtype | None = None) -> tuple[Any, ...]:
        """Sends arrays of one dtype to ranks; returns those that come from ranks, of those shapes.

        What this rank sends to itself is copied.
        """
        import cupy

        self._group.connect()
        rank = self._mpi_comm.rank
        dtype = next(iter(xs.values())).dtype if dtype is None else dtype
        ys = {source: xs[rank].copy('C') if source == rank else cupy.empty(shape, dtype)
              for source, shape in shapes.items()}
        self._group.exchange(
            {dest: cupy.ascontiguousarray(x).reshape(-1) for dest, x in xs.items() if dest != rank},
            {source: y.reshape(-1) for source, y in ys.items() if source != rank})
        return tuple(ys.values())
