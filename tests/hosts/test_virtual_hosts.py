"""The virtual hosts are like those of a cluster, and leave nothing behind."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from jobs import processes
from time_limits import seconds, wait_until
from virtual_hosts import Hosts

pytestmark = [pytest.mark.full, pytest.mark.mpi_skip]

RANKS = """
import os, socket, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
open(f'/dev/shm/{world.rank}', 'w').close()
world.Barrier()
node = world.Split_type(MPI.COMM_TYPE_SHARED).size
files = ''.join(sorted(name for name in os.listdir('/dev/shm') if name.isdecimal()))
lines = world.gather(f'{socket.gethostname()} {MPI.Get_processor_name()} {node} {files}')
if world.rank == 0:
    print(*lines, sep=chr(10))
"""
SEND = """
import time
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
x = np.ones(25 << 20, np.uint8)
for _ in range(2):
    world.Barrier()
    start = time.perf_counter()
    world.Send(x, 1) if world.rank == 0 else world.Recv(x, 0)
    world.Barrier()
if world.rank == 0:
    print(8 * len(x) / (time.perf_counter() - start) / 1e9)
"""
SLEEP = """
import sys, time
from virtual_hosts import Hosts
with Hosts([1]) as hosts:
    hosts.start(0, ['sleep', '{}'])
    print('ready', flush=True)
    time.sleep(3600)
"""


def test_mpi_sees_hosts():
    with Hosts([2, 1]) as hosts:
        done = hosts.run([sys.executable, '-c', RANKS], timeout=seconds(30))
    assert done.stdout.splitlines() == ['node0 node0 2 01', 'node0 node0 2 01', 'node1 node1 1 2']


def test_links_have_the_rate():
    with Hosts([1, 1], rate='1gbit') as hosts:
        done = hosts.run([sys.executable, '-c', SEND], timeout=seconds(30))
    assert .3 < float(done.stdout) < 1.05  # this needs one core; there may be less


def test_two_at_a_time():
    with Hosts([1, 1]) as one, Hosts([1, 1]) as other:
        for hosts in (one, other):
            done = hosts.run([sys.executable, '-c', RANKS], timeout=seconds(30))
            assert done.returncode == 0, done.stdout


def test_a_timeout_ends_all_processes():
    with Hosts([1, 1]) as hosts:
        sleep = 'import time; print(1, flush=True); time.sleep(3600)'
        with hosts.popen([sys.executable, '-c', sleep]) as process:
            printed = process.stdout.readline() + process.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                hosts.finish(process, timeout=.1)
        assert printed == '1\n1\n'
        done = hosts.run([sys.executable, '-c', RANKS], timeout=seconds(30))
        assert done.returncode == 0, done.stdout


def test_nothing_is_left_after_an_error():
    with pytest.raises(ZeroDivisionError), Hosts([1]) as hosts:
        process = hosts.start(0, ['sleep', '3600'])
        raise ZeroDivisionError
    assert process.wait(seconds(20)) != 0


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_after_a_signal(number, default_signals):
    duration = f'{3600 + os.getpid()}.{int(number)}'
    with subprocess.Popen([sys.executable, '-c', SLEEP.format(duration)], text=True,
                          env={**os.environ, 'PYTHONPATH': str(pathlib.Path(__file__).parents[1])},
                          stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == 'ready\n'
            wait_until(lambda: sleeping(duration))
            process.send_signal(number)
            process.wait(seconds(20))
        finally:
            process.kill()
    wait_until(lambda: not sleeping(duration))


def sleeping(duration):
    """The processes that sleep for this time."""
    return processes(lambda folder: (folder / 'cmdline').read_bytes().split(b'\0')[:2] == [
        b'sleep', duration.encode()])


def test_a_rate_that_is_none():
    with pytest.raises(OSError, match='illegal value for "rate"'), Hosts([1]) as hosts:
        hosts.set_rate(0, 'nowhere')
