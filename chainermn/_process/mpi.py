"""``mpi4py.MPI``, imported on first use, because importing it initializes MPI."""
from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ['MPI']

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    class _Mpi:
        """A placeholder for the module, so that importing this package does not initialize MPI."""

        def __getattr__(self, name: str) -> object:
            from mpi4py import MPI

            value = getattr(MPI, name)
            setattr(self, name, value)  # later uses do not call this method
            return value

    MPI = _Mpi()
