"""The offset between two clocks is measured within the stated error."""

import time

from mpi4py import MPI

from chainermn._timeline import clock_sync

SHIFT = 10**12  # of the clock of each rank to that of the rank before; in nanoseconds


def test_offsets_of_clocks_that_are_known():
    mpi_comm = MPI.COMM_WORLD.Dup()
    offset, error = clock_sync.measure(
        mpi_comm, lambda: time.perf_counter_ns() + SHIFT * mpi_comm.rank)
    # The processes of one machine have the same clock.
    assert abs(offset + SHIFT * mpi_comm.rank) <= error < 10**9
    assert (error == 0) == (mpi_comm.rank == 0)
    mpi_comm.Free()
