"""One buffer per model and dtype, exchanged by one collective."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chainermn.communicators import _bucket
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase


class FlatCommunicator(MpiCommunicatorBase):
    """Averages all gradients of a dtype by one MPI_Allreduce, on host and device arrays."""

    def _groups(self, arrays: Sequence[Any]) -> list[list[Any]]:
        return _bucket.by_dtype(arrays)
