"""What the tests on a GPU share. One GPU is enough for all ranks."""

import os

import pytest
from mpi4py import MPI

import chainermn


@pytest.fixture(scope='session')
def device_id():
    """The number of this rank's GPU, from 0 of those that it sees.

    NCCL wants each rank of a host to have a GPU of its own. Where some share one, each rank is a
    host of its own; then nothing goes through NVLink or shared memory. NCCL reads this when it
    first connects.
    """
    import cupy

    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    device_id = node.rank % cupy.cuda.runtime.getDeviceCount()
    buses = node.allgather(cupy.cuda.Device(device_id).pci_bus_id)
    node.Free()
    if any(MPI.COMM_WORLD.allgather(len(set(buses)) < len(buses))):
        os.environ['NCCL_HOSTID'] = f'rank {MPI.COMM_WORLD.rank}'
        os.environ['NCCL_SOCKET_IFNAME'] = 'lo'
    return device_id


@pytest.fixture(autouse=True)
def device(device_id):
    """Make a device the current one; tests are skipped before this where there is none."""
    import cupy

    device = cupy.cuda.Device(device_id)
    device.use()
    if '-fsanitize=address' in os.environ.get('VGPU_CXXFLAGS', ''):
        cupy.cuda.set_allocator(None)  # see tests/virtual_gpu/sanitizer.py
    return device


@pytest.fixture
def start():
    """Return a function: the first words of a command for some ranks, and its environment."""
    import cupy

    def start(ranks):
        command = ['mpiexec', '-n', str(ranks)]
        env = os.environ | {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}
        if cupy.cuda.runtime.getDeviceCount() < ranks:  # see device_id
            env['NCCL_SOCKET_IFNAME'] = 'lo'
            host = 'NCCL_HOSTID=rank$PMI_RANK$OMPI_COMM_WORLD_RANK exec "$@"'
            command += ['sh', '-c', host, 'sh']
        return command, env
    return start


@pytest.fixture(scope='session')
def is_virtual():
    """Whether this is the virtual GPU of tests/virtual_gpu, which is slow."""
    import cupy

    return cupy.cuda.runtime.getDeviceProperties(0)['name'] == b'Virtual GPU'


@pytest.fixture(scope='session')
def side(is_virtual):
    """The side of a square matrix whose product keeps a GPU busy for a while.

    The virtual GPU runs nothing until the host waits for it, so that any size will do.
    """
    return 50 if is_virtual else 2000


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
    """Call a function on all ranks and return its error, which has to be the same on all."""
    def same_error(call, *args):
        with pytest.raises(Exception) as caught:
            call(*args)
        said = MPI.COMM_WORLD.allgather((caught.type.__name__, str(caught.value)))
        assert len(set(said)) == 1, said
        return caught.value
    return same_error
