"""CUDA-aware MPI: device memory is passed only after the device has finished with it."""

import itertools

import numpy as np
import pytest
from each_case import each_case
from mpi4py import MPI

import chainermn
from chainermn.communicators.compression import get

pytestmark = pytest.mark.mpi(min_size=2)

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank

CALLS = ['Allgather', 'Allgatherv', 'Allreduce', 'Alltoall', 'Alltoallv', 'Bcast', 'Gather',
         'Gatherv', 'Irecv', 'Isend', 'Issend', 'Recv', 'Reduce', 'Reduce_scatter', 'Scatter',
         'Scatterv', 'Send', 'Ssend']


def watched(base, gpu):
    """A class of MPI communicators whose calls assert that the device is done."""
    def method(name):
        call = getattr(base, name)

        def watching(self, *args, **kwargs):
            if any(isinstance(x, gpu.cupy.ndarray) for x in flat(args)):
                gpu.n_given += 1
                if gpu.streams[-1].pending:
                    gpu.wrong.append(f'{name} of device memory while the device is at work')
            return call(self, *args, **kwargs)
        return watching

    def split(self, *args):
        return type(self)(base.Split(self, *args))
    return type(base.__name__, (base,), {'Split': split} | {name: method(name) for name in CALLS})


def flat(args):
    for x in args:
        if isinstance(x, (list, tuple)):
            yield from flat(x)
        else:
            yield x


@pytest.fixture(params=['naive', 'flat', 'pure_nccl', 'non_cuda_aware'])
def comm(request, gpu, monkeypatch):
    monkeypatch.setenv('CHAINERMN_CUDA_AWARE', '1')
    if request.param == 'non_cuda_aware':
        monkeypatch.setattr(MPI, 'Get_processor_name', lambda: f'node {RANK}')
    gpu.n_given = 0
    comm = chainermn.create_communicator(request.param, watched(MPI.Intracomm, gpu)(MPI.COMM_WORLD))
    yield comm
    comm.finalize()


OPERATIONS = {
    'bcast': lambda comm, x: comm.bcast(x, SIZE - 1),
    'gather': lambda comm, x: comm.gather(x, SIZE - 1),
    'allgather': lambda comm, x: comm.allgather(x),
    'allreduce': lambda comm, x: comm.allreduce(x),
    'allreduce_many': lambda comm, x: comm.allreduce_many([x, x[:1]]),
    'reduce': lambda comm, x: comm.reduce(x, root=SIZE - 1),
    'reduce_scatter': lambda comm, x: comm.reduce_scatter([x] * SIZE),
    'alltoall': lambda comm, x: comm.alltoall([x] * SIZE),
    'scatter': lambda comm, x: comm.scatter([x] * SIZE, SIZE - 1),
    'send and recv': lambda comm, x: send_and_recv(comm, x),
    'send and recv a tuple': lambda comm, x: send_and_recv(comm, (x, x)),
    'isend and irecv': lambda comm, x: isend_and_irecv(comm, x),
    'multi_node_mean': lambda comm, x: comm.multi_node_mean(x),
}


def send_and_recv(comm, data):
    """Sends to the next rank; returns the data of the previous one."""
    if RANK % 2 == 0:
        comm.send(data, (RANK + 1) % SIZE, 3)
        return comm.recv((RANK - 1) % SIZE, 3)
    received = comm.recv((RANK - 1) % SIZE, 3)
    comm.send(data, (RANK + 1) % SIZE, 3)
    return received


def isend_and_irecv(comm, x):
    received = comm.irecv((RANK - 1) % SIZE, 3)
    sent = comm.isend(x, (RANK + 1) % SIZE, 3)
    sent.wait()
    return received.wait()


def arrays(result):
    return [] if result is None else list(result) if isinstance(result, tuple) else [result]


@each_case('operation, different', [
    *((operation, False) for operation in OPERATIONS),
    *((operation, True) for operation in ('gather', 'allgather', 'alltoall', 'scatter'))])
def test_operations(comm, gpu, operation, different):
    gpu.n_given = 0
    x = np.arange(9000 + 6 * RANK * different, dtype='f4').reshape(-1, 3) + RANK  # no header's
    found = OPERATIONS[operation](comm, gpu.cupy.asarray(x) * 1)  # just computed
    for y, expected in zip(arrays(found), arrays(OPERATIONS[operation](comm, x)), strict=True):
        assert isinstance(y, gpu.cupy.ndarray)
        np.testing.assert_array_equal(y.get(), expected)
    if comm.has_nccl and 'send' not in operation and not (operation == 'allgather' and different):
        assert gpu.n_given == 0
    else:
        assert gpu.n_given > 0


@each_case('batched, compression', itertools.product([True, False], [None, 'fp16', '2bit']))
def test_mean_grad(comm, gpu, make_model, batched, compression):
    gpu.n_given = 0
    comm.set_config('batched_copy', batched)
    models = [make_model(rank) for rank in range(SIZE)]
    expected = {name: np.mean([getattr(model, name).grad.get().astype('f8') for model in models],
                              axis=0) for name in 'abcde'}
    comm.multi_node_mean_grad(models[RANK], compression=get(compression))
    if compression != '2bit':
        for name, value in expected.items():
            grad = getattr(models[RANK], name).grad.get()
            np.testing.assert_allclose(grad.astype('f8'), value, 4e-3, 4e-3)
    assert (gpu.n_given > 0) == (not comm.has_nccl)


def test_bcast_data(comm, gpu, make_model):
    model = make_model(RANK)
    comm.bcast_data(model)
    for name in 'abcd':
        np.testing.assert_array_equal(
            getattr(model, name).array, getattr(make_model(0), name).array)
    assert (gpu.n_given > 0) == (not comm.has_nccl)


def test_mean_queue(comm, gpu):
    if comm.has_nccl:
        pytest.skip('goes through NCCL')
    queue = comm.mean_queue()
    mean, = queue.submit({'x': gpu.cupy.asarray(np.full(9000, RANK, 'f4'))})
    queue.wait()
    np.testing.assert_array_equal(mean.get(), (SIZE - 1) / 2)
    assert gpu.n_given > 0
