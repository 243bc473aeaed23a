"""What the tests on a GPU share.  One GPU is enough for all ranks."""

import os

import pytest
from mpi4py import MPI

import chainermn

RANK = MPI.COMM_WORLD.rank

# NCCL wants each rank of a host to have a GPU of its own; so each rank is a host of its own.  NCCL
# reads this when it first connects.
os.environ['NCCL_HOSTID'] = f'rank {RANK}'
os.environ['NCCL_SOCKET_IFNAME'] = 'lo'


@pytest.fixture(autouse=True)
def device():
    """Makes a device the current one; tests are skipped before this where there is none."""
    import cupy

    device = cupy.cuda.Device(RANK % cupy.cuda.runtime.getDeviceCount())
    device.use()
    return device


@pytest.fixture(params=['pure_nccl', 'non_cuda_aware', 'flat', 'naive'])
def name(request):
    return request.param


@pytest.fixture
def comm(name):
    comm = chainermn.create_communicator(name)
    yield comm
    comm.finalize()


@pytest.fixture
def same_error():
    """Calls a function on all ranks and returns its error, which has to be the same on all."""
    def same_error(call, *args):
        with pytest.raises(Exception) as caught:
            call(*args)
        said = MPI.COMM_WORLD.allgather((caught.type.__name__, str(caught.value)))
        assert len(set(said)) == 1, said
        return caught.value
    return same_error
