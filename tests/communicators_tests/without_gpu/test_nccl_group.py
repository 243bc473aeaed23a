"""What the thread that watches over a rank learns of the exchanges on the device."""

import threading
import time

import numpy as np
import pytest

import chainermn
from chainermn import nccl
from chainermn._diagnostics import watchdog


@pytest.fixture
def comm(gpu):
    comm = chainermn.create_communicator('pure_nccl')
    yield comm
    comm.finalize()


@pytest.fixture
def group(gpu, comm):
    """NCCL on a GPU that is not the one on which threads begin."""
    with gpu.cupy.cuda.Device(1):
        comm._nccl.connect()
        yield comm._nccl


def in_a_thread(call):
    """What it returns in a thread of its own, as that of the watchdog."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(30)
    assert results, 'it blocks, or failed'
    return results[0]


def test_an_exchange_that_the_device_does_not_finish(group, gpu):
    assert in_a_thread(group.waits) == (0, '')
    group.all_reduce(gpu.cupy.asarray(np.ones(3, 'f')))
    assert in_a_thread(group.waits) == (0, 'all-reduce of 3 float32 by NCCL on GPU 1')
    group._newest[0].status = 600
    time.sleep(.01)
    assert in_a_thread(group.waits)[0] > 0
    watch = watchdog.Watch()  # whose thread does not run
    assert in_a_thread(watch._wrong_on_devices) == ''
    watch._default = .001
    assert 's in all-reduce of 3 float32 by NCCL on GPU 1, and the time limit is' in (
        in_a_thread(watch._wrong_on_devices))


def test_an_error_of_nccl(group):
    assert in_a_thread(group.error) == ''

    def check():
        raise nccl.NcclError('remote error')

    group.nccl_comm.check_async_error = check
    assert in_a_thread(group.error) == 'remote error'
    assert in_a_thread(watchdog.Watch()._wrong_on_devices) == 'NCCL failed: remote error'


def test_an_error_of_the_device(group, gpu):
    """It is not taken for an exchange that is under way until the time limit."""
    group.all_reduce(gpu.cupy.asarray(np.ones(3, 'f')))
    group._newest[0].status = 700
    assert in_a_thread(group.error) == 'GPU 1: 700'  # CuPy says what that means
    assert in_a_thread(group.waits)[0] == 0
    assert in_a_thread(watchdog.Watch()._wrong_on_devices) == 'NCCL failed: GPU 1: 700'


def test_abort(group, gpu):
    in_a_thread(lambda: [group.abort()])
    assert gpu.log[-1] == 'abort on caller'


def test_only_those_that_are_connected(group):
    assert group in watchdog._on_devices
    group.destroy()
    assert group not in watchdog._on_devices
    assert group.waits() == (0, '')
    assert group.error() == ''
    group.abort()


def test_a_look_while_it_is_destroyed(group):
    """The communicator is none any more, which is no error."""
    said = []
    destroy = group.nccl_comm.destroy

    def slowly():
        destroy()
        said.append(in_a_thread(watchdog.Watch()._wrong_on_devices))
        said.append(in_a_thread(group.error))  # of a watchdog that has begun to look before
        said.append(in_a_thread(group.waits)[0])

    group.nccl_comm.destroy = slowly
    group.destroy()
    assert said == ['', '', 0]


def test_it_is_not_destroyed_during_a_look(group):
    entered, go = threading.Event(), threading.Event()
    said, destroyed = [], []
    check, destroy = group.nccl_comm.check_async_error, group.nccl_comm.destroy

    def slowly():
        entered.set()
        go.wait(30)
        said.append(list(destroyed))
        check()

    group.nccl_comm.check_async_error = slowly
    group.nccl_comm.destroy = lambda: (destroyed.append(True), destroy())
    look = threading.Thread(target=group.error)
    look.start()
    assert entered.wait(30)
    threading.Timer(.1, go.set).start()
    group.destroy()
    look.join(30)
    assert (said, destroyed) == ([[]], [True])


def test_the_list_changes_during_a_look(group):
    """The watchdog looks through what there was when it began."""
    looking = iter(watchdog._on_devices)
    assert next(looking) is group
    group.destroy()
    assert list(looking) == []
