"""NcclGroup: the watchdog's view of exchanges on the device."""

import threading
import time
import types

import numpy as np
import pytest

import chainermn
from chainermn import nccl
from chainermn._diagnostics import devices, watchdog


@pytest.fixture
def comm(gpu):
    comm = chainermn.create_communicator('pure_nccl')
    yield comm
    comm.finalize()


@pytest.fixture
def group(gpu, comm, monkeypatch):
    """NCCL on a GPU that is not the default of new threads.

    The watchdog of this process must not find the failures of these tests: it would abort them.
    """
    monkeypatch.setattr(watchdog, 'devices', types.SimpleNamespace(failure=lambda _: ''))
    with gpu.cupy.cuda.Device(1):
        comm._transport._nccl.connect()
        yield comm._transport._nccl


def in_a_thread(call):
    """Returns the result of a call in another thread, like the watchdog's."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(30)
    assert results, 'it blocks, or failed'
    return results[0]


def failure(timeout=3600.):
    return in_a_thread(lambda: devices.failure(timeout))


def test_unfinished_exchange(group, gpu):
    assert in_a_thread(group.running) == (0, '')
    group.all_reduce(gpu.cupy.asarray(np.ones(3, 'f')))
    assert in_a_thread(group.running) == (0, 'all-reduce of 3 float32 by NCCL on GPU 1')
    group._newest[0].status = 600
    time.sleep(.01)
    assert in_a_thread(group.running)[0] > 0
    assert failure() == ''
    assert 's in all-reduce of 3 float32 by NCCL on GPU 1; the timeout is' in failure(.001)


def test_nccl_error(group):
    assert in_a_thread(group.error) == ''

    def check():
        raise nccl.NcclError('remote error')

    group.nccl_comm.check_async_error = check
    assert in_a_thread(group.error) == 'remote error'
    assert failure() == 'NCCL failed: remote error'


def test_device_error(group, gpu):
    """It is reported at once, not as a running exchange until the time limit."""
    group.all_reduce(gpu.cupy.asarray(np.ones(3, 'f')))
    group._newest[0].status = 700
    assert in_a_thread(group.error) == 'GPU 1: 700'  # CuPy says what that means
    assert in_a_thread(group.running)[0] == 0
    assert failure() == 'NCCL failed: GPU 1: 700'


def test_abort(group, gpu):
    in_a_thread(lambda: [group.abort()])
    assert gpu.log[-1] == 'abort on caller'


def test_only_connected_groups_are_watched(group):
    assert group in devices._all
    group.destroy()
    assert group not in devices._all
    assert group.running() == (0, '')
    assert group.error() == ''
    group.abort()


def test_query_while_destroying(group):
    """A destroyed communicator is not an error."""
    results = []
    destroy = group.nccl_comm.destroy

    def slowly():
        destroy()
        results.append(failure())
        results.append(in_a_thread(group.error))  # of a watchdog that has started its query before
        results.append(in_a_thread(group.running)[0])

    group.nccl_comm.destroy = slowly
    group.destroy()
    assert results == ['', '', 0]


def test_destroy_waits_for_query(group):
    entered, go = threading.Event(), threading.Event()
    results, destroyed = [], []
    check, destroy = group.nccl_comm.check_async_error, group.nccl_comm.destroy

    def slowly():
        entered.set()
        go.wait(30)
        results.append(list(destroyed))
        check()

    group.nccl_comm.check_async_error = slowly
    group.nccl_comm.destroy = lambda: (destroyed.append(True), destroy())
    query = threading.Thread(target=group.error)
    query.start()
    assert entered.wait(30)
    threading.Timer(.1, go.set).start()
    group.destroy()
    query.join(30)
    assert (results, destroyed) == ([[]], [True])


def test_list_changes_during_query(group):
    """The watchdog iterates over the list as it was at the start."""
    groups = iter(devices._all)
    assert next(groups) is group
    group.destroy()
    assert list(groups) == []
