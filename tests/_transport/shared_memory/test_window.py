"""Shared memory of a node, with counters for synchronization."""

import os
import pathlib
import subprocess
import sys

import pytest
from mpi4py import MPI

from chainermn._transport.shared_memory.window import Window, _Process

pytestmark = pytest.mark.every_size

MPI_COMM = MPI.COMM_WORLD
RANK, SIZE = MPI_COMM.rank, MPI_COMM.size


@pytest.fixture
def window():
    mpi_comm = MPI_COMM.Dup()
    # Different sizes, not multiples of a page.
    window = Window(mpi_comm, 100 + RANK, f'rank {RANK}')
    mpi_comm.Barrier()
    yield window
    MPI_COMM.Barrier()
    window.free()
    mpi_comm.Free()


@pytest.mark.mpi(min_size=2)
def test_failed_rank_is_named(window):
    if RANK == 1:
        window.fail()
    else:
        window.publish(1)
        with pytest.raises(RuntimeError, match=r'^rank 1 \(.*\) failed during an operation'):
            window.wait(1)


def test_is_alive():
    this = _Process.this()
    assert this.pid == os.getpid()
    assert this.is_alive()
    if not os.path.exists('/proc/self/stat'):
        pytest.skip('needs /proc')
    with subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']) as process:
        stat = pathlib.Path(f'/proc/{process.pid}/stat').read_text()
        other = this._replace(pid=process.pid, start=stat.rpartition(')')[2].split()[19])
        assert other.is_alive()
        assert not other._replace(start='1').is_alive()  # another process has its number
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not other.is_alive()  # a zombie
        process.wait()
        assert not other.is_alive()
        # PIDs are meaningless in another namespace, or without /proc.
        assert other._replace(namespace='pid:[0]').is_alive()
        assert other._replace(start='', namespace='').is_alive()
