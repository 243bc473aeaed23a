"""``mpi4py.MPI``, which is imported at its first use: importing it initializes MPI."""
from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ['MPI']

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    class _Mpi:
        """Stands for the module, so that ours can be imported without initializing MPI."""

        def __getattr__(self, name: str) -> object:
            from mpi4py import MPI

            value = getattr(MPI, name)
            setattr(self, name, value)  # later uses do not come here
            return value

    MPI = _Mpi()
