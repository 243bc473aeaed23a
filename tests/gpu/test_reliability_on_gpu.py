"""A GPU that waits for another one is noticed, though no verb blocks."""

import time

import numpy as np
import pytest
from mpi4py import MPI

import chainermn

pytestmark = pytest.mark.gpu


@pytest.mark.mpi(min_size=2)
def test_a_device_that_waits():
    import cupy

    comm = chainermn.create_communicator('pure_nccl')
    group = comm._nccl
    group.connect()
    x = cupy.ones(1000, np.float32)
    if comm.rank == 0:
        group.all_reduce(x)
        time.sleep(.5)
        seconds, what = group.waits()
        assert seconds > .4 and what.startswith('all-reduce of 1000 float32 by NCCL on GPU')
    MPI.COMM_WORLD.Barrier()
    if comm.rank > 0:
        group.all_reduce(x)
    cupy.cuda.get_current_stream().synchronize()
    assert group.waits()[0] == 0 and group.error() == ''
    comm.finalize()


def test_a_communicator_that_is_aborted():
    import cupy

    comm = chainermn.create_communicator('pure_nccl')
    comm._nccl.connect()
    comm._nccl.all_reduce(cupy.ones(10, np.float32))
    cupy.cuda.get_current_stream().synchronize()
    comm._nccl.abort()
    comm._nccl.nccl_comm = None  # nothing is left to destroy
    comm.finalize()
