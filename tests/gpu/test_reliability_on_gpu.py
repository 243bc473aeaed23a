"""A GPU that waits for another one is noticed, though no operation blocks."""

import ctypes
import threading
import time
import types

import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn import nccl
from chainermn._diagnostics import devices

pytestmark = pytest.mark.gpu


@pytest.mark.mpi(min_size=2)
def test_a_device_that_waits():
    import cupy

    comm = chainermn.create_communicator('pure_nccl')
    group = comm._context.transport._nccl
    group.connect()
    x = cupy.ones(1000, np.float32)
    if comm.rank == 0:
        group.all_reduce(x)
        time.sleep(.5)
        seconds, what = group.running()
        assert seconds > .4 and what.startswith('all-reduce of 1000 float32 by NCCL on GPU')
        assert devices.failure(3600) == ''
        assert 's in all-reduce of 1000 float32 by NCCL on GPU' in devices.failure(.001)
    MPI.COMM_WORLD.Barrier()
    if comm.rank > 0:
        group.all_reduce(x)
    cupy.cuda.get_current_stream().synchronize()
    assert group.running()[0] == 0 and group.error() == ''
    comm.finalize()


@pytest.fixture
def group(monkeypatch):
    """NCCL among all ranks, after an all-reduce, hidden from the watchdog."""
    import cupy

    watched = []
    monkeypatch.setattr(devices, 'add', watched.append)
    monkeypatch.setattr(devices, 'remove', watched.remove)
    comm = chainermn.create_communicator('pure_nccl')
    group = comm._context.transport._nccl
    assert (group.running(), group.error(), watched) == ((0, ''), '', [])
    group.connect()
    assert watched == [group]
    group.all_reduce(cupy.ones(10, np.float32))
    cupy.cuda.get_current_stream().synchronize()
    yield group
    comm.finalize()
    assert (group.running(), group.error(), watched) == ((0, ''), '', [])
    group.abort()


def replaced(group, **methods):
    """Replace methods of the NCCL communicator of a group; return the real ones."""
    real = group.nccl_comm
    group.nccl_comm = types.SimpleNamespace(**{
        'destroy': real.destroy, 'abort': real.abort,
        'check_async_error': real.check_async_error} | methods)
    return real


def test_an_error_of_nccl(group):
    def check():
        raise nccl.NcclError(3)

    real = replaced(group, check_async_error=check)
    assert group.error().startswith('NCCL_ERROR_')
    group.nccl_comm = real


def test_an_error_of_the_device(group, monkeypatch):
    """It is reported at once, not as a running exchange until the time limit."""
    import cupy

    assert group.error() == ''
    with monkeypatch.context() as context:
        context.setattr(cupy.cuda.runtime, 'eventQuery', lambda event: 400)
        assert group.error().startswith(f'GPU {group.device_id}: cudaErrorInvalidResourceHandle')
        assert group.running()[0] == 0


def test_a_query_while_a_group_is_destroyed(group):
    """A destroyed communicator is not an error."""
    answers = []

    def destroy():
        real.destroy()
        thread = threading.Thread(target=lambda: answers.extend([group.error(), group.running()]))
        thread.start()
        thread.join(30)

    real = replaced(group, destroy=destroy)
    group.destroy()
    assert answers[0] == '' and answers[1][0] == 0


def test_destroy_waits_for_a_query(group):
    entered, go = threading.Event(), threading.Event()
    order = []

    def check():
        entered.set()
        go.wait(30)
        order.append('checked')

    def destroy():
        order.append('destroyed')
        real.destroy()

    real = replaced(group, check_async_error=check, destroy=destroy)
    query = threading.Thread(target=group.error)
    query.start()
    assert entered.wait(30)
    threading.Timer(.1, go.set).start()
    group.destroy()
    query.join(30)
    assert order == ['checked', 'destroyed']


def test_a_communicator_that_is_aborted():
    import cupy

    comm = chainermn.create_communicator('pure_nccl')
    comm._context.transport._nccl.connect()
    comm._context.transport._nccl.all_reduce(cupy.ones(10, np.float32))
    cupy.cuda.get_current_stream().synchronize()
    comm._context.transport._nccl.abort()
    comm._context.transport._nccl.nccl_comm = None  # nothing is left to destroy
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

    if not any(MPI.COMM_WORLD.allgather(device.id)):
        pytest.skip('threads begin on device 0')

    def has_context_on_0():
        flags, is_active = ctypes.c_uint(), ctypes.c_int()
        ctypes.CDLL('libcuda.so.1').cuDevicePrimaryCtxGetState(
            0, ctypes.byref(flags), ctypes.byref(is_active))
        return bool(is_active.value)

    comm = chainermn.create_communicator('pure_nccl')
    comm.allreduce(cupy.ones(1000, np.float32))
    group = comm._context.transport._nccl_of_arrays
    thread = threading.Thread(target=lambda: (group.running(), group.error()))
    thread.start()
    thread.join()
    comm.finalize()
    assert device.id == 0 or not has_context_on_0()
