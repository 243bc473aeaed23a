"""What the thread that watches over a rank learns of the exchanges on the device."""

import time

import numpy as np
import pytest

import chainermn
from chainermn import nccl
from chainermn.communicators import _nccl_group, _watch


@pytest.fixture
def group(gpu):
    comm = chainermn.create_communicator('pure_nccl')
    comm._nccl.connect()
    yield comm._nccl
    comm.finalize()


def test_an_exchange_that_the_device_does_not_finish(group, gpu):
    assert group.waits() == (0, '')
    group.all_reduce(gpu.cupy.asarray(np.ones(3, 'f')))
    assert group.waits() == (0, 'all-reduce of 3 float32 by NCCL on GPU 0')
    group._newest[0].status = 600
    time.sleep(.01)
    assert group.waits()[0] > 0
    watch = _watch.Watch()  # whose thread does not run
    assert watch._of_nccl() == ''
    watch._default = .001
    assert 's in all-reduce of 3 float32 by NCCL on GPU 0, and the time limit is' in (
        watch._of_nccl())


def test_an_error_of_nccl(group):
    assert group.error() == ''

    def check():
        raise nccl.NcclError('remote error')

    group.nccl_comm.check_async_error = check
    assert group.error() == 'remote error'
    assert _watch.Watch()._of_nccl() == 'NCCL failed: remote error'
    del group.nccl_comm.check_async_error


def test_only_those_that_are_connected(group):
    assert group in _nccl_group.connected
    group.destroy()
    assert group not in _nccl_group.connected
    assert group.waits() == (0, '')
