"""A GPU that waits for another one is noticed, though no operation blocks."""

import ctypes
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn._diagnostics import devices

pytestmark = pytest.mark.gpu


@pytest.mark.mpi(min_size=2)
def test_a_device_that_waits():
    import cupy

    comm = chainermn.create_communicator('pure_nccl')
    group = comm._transport._nccl
    group.connect()
    x = cupy.ones(1000, np.float32)
    if comm.rank == 0:
        group.all_reduce(x)
        time.sleep(.5)
        seconds, what = group.running()
        assert seconds > .4 and what.startswith('all-reduce of 1000 float32 by NCCL on GPU')
    MPI.COMM_WORLD.Barrier()
    if comm.rank > 0:
        group.all_reduce(x)
    cupy.cuda.get_current_stream().synchronize()
    assert group.running()[0] == 0 and group.error() == ''
    comm.finalize()


def test_a_communicator_that_is_aborted():
    import cupy

    comm = chainermn.create_communicator('pure_nccl')
    comm._transport._nccl.connect()
    comm._transport._nccl.all_reduce(cupy.ones(10, np.float32))
    cupy.cuda.get_current_stream().synchronize()
    comm._transport._nccl.abort()
    comm._transport._nccl.nccl_comm = None  # nothing is left to destroy
    comm.finalize()


def test_finalize_while_the_watchdog_looks():
    import cupy

    answers, is_over = set(), threading.Event()

    def look():
        while not is_over.is_set():
            answers.add(devices.failure(3600))

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(20):
        comm = chainermn.create_communicator('pure_nccl')
        comm.allreduce(cupy.ones(1000, np.float32))
        comm.finalize()
    is_over.set()
    thread.join()
    assert answers == {''}


def test_the_watchdog_uses_the_device_of_the_exchange(device):
    """A context on another one would take half a gigabyte there."""
    import cupy

    if device.id == 0:
        pytest.skip('threads begin on this one')
    comm = chainermn.create_communicator('pure_nccl')
    comm.allreduce(cupy.ones(1000, np.float32))
    group = comm._transport._nccl_of_arrays
    thread = threading.Thread(target=lambda: (group.running(), group.error()))
    thread.start()
    thread.join()
    flags, is_active = ctypes.c_uint(), ctypes.c_int()
    ctypes.CDLL('libcuda.so.1').cuDevicePrimaryCtxGetState(
        0, ctypes.byref(flags), ctypes.byref(is_active))
    assert not is_active.value
    comm.finalize()
