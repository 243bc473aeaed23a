"""Shared memory carries large sums of host arrays; MPI carries the rest."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from chainermn._transport.mpi import LARGE, MpiTransport
from chainermn._transport.shared_memory.exchange import SharedMemory

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


class SharedTransport(MpiTransport):
    """The collectives for arrays that are on the host on all ranks.

    Args:
        mpi_comm: The ranks.  Nothing else may use its messages meanwhile.
        memory: Gives the shared memory, or ``None`` where there is none, on all ranks alike.
    """

    def __init__(self, mpi_comm: Any, memory: Callable[[], SharedMemory | None]) -> None:
        super().__init__(mpi_comm)
        self._memory = memory

    def allreduce(self, x: Any, op: str, out: Any = None) -> Any:
        if op != 'sum' or x.nbytes < LARGE or x.dtype not in _FLOATS or (
                memory := self._memory()) is None:
            return super().allreduce(x, op, out)
        y = np.empty(x.shape, x.dtype) if out is None or out.dtype != x.dtype else out
        memory.sum([x], None if y is x else [y])
        return y

    def sums(self, xs: Sequence[Any]) -> list[Any] | None:
        if len({x.dtype for x in xs}) > 1 or xs[0].dtype not in _FLOATS or (
                sum(x.nbytes for x in xs) < LARGE) or (memory := self._memory()) is None:
            return None
        ys = [np.empty(x.shape, x.dtype) for x in xs]
        memory.sum(xs, ys)
        return ys
