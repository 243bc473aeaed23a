"""Out of memory for a payload: the receiver raises, and the sender continues."""

import contextlib
import gc
import resource

import numpy as np
import pytest
from shared_fixtures import communicators

import chainermn

SIZE = 300 * 2**20

comm = communicators('naive')


@contextlib.contextmanager
def little_memory():
    """Limits the memory of this process to less than a payload."""
    gc.collect()  # a payload of an earlier test, freed later, would make room for one more
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open('/proc/self/statm') as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    # Half of a payload is left: for MPI, which may fail in other ways, and since earlier tests may
    # free memory only now.
    resource.setrlimit(resource.RLIMIT_AS, (used + SIZE // 2, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


LARGE = np.zeros(SIZE, np.uint8)
PAYLOADS = {
    'array': LARGE, 'many dimensions': LARGE.reshape((1,) * 20 + (-1,)),
    'tuple': (np.ones(3), LARGE, np.ones(5000), LARGE), 'object': {'x': LARGE, 'y': [1] * 100_000}}
WAYS = {
    'send_obj': (lambda comm, x: comm.send_obj(x, 1), lambda comm: comm.recv_obj(0)),
    'send': (lambda comm, x: comm.send(x, 1, 0), lambda comm: comm.recv(0, 0)),
    'isend': (lambda comm, x: comm.isend(x, 1).wait(), lambda comm: comm.irecv(0).wait()),
    'functions.send': (
        lambda comm, x: chainermn.functions.send(x, comm, 1),
        lambda comm: chainermn.functions.recv(comm, 0)),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.sample(2)
@pytest.mark.parametrize('way, payload', [
    (way, payload) for way in WAYS for payload in PAYLOADS
    if (way == 'send_obj') == (payload == 'object')
    and not (way == 'functions.send' and payload == 'many dimensions')])
def test_messages(comm, way, payload):
    send, receive = WAYS[way]
    for _ in range(2):
        if comm.rank == 0:
            send(comm, PAYLOADS[payload])
            send(comm, np.ones(2) if way != 'send_obj' else 1)
        elif comm.rank == 1:
            with little_memory(), pytest.raises(
                    MemoryError, match='rank 1 cannot allocate memory for the message from rank 0'):
                receive(comm)
            assert np.size(receive(comm).array if way == 'functions.send' else receive(comm)) == (
                1 if way == 'send_obj' else 2)
    comm.barrier()


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('operation', ['gather_obj', 'allgather_obj', 'scatter_obj'])
def test_objects_in_collective_calls(comm, operation):
    """The other ranks get their objects."""
    obj = PAYLOADS['object'] if comm.rank == 1 else None
    call = (lambda: comm.scatter_obj([0, obj, *range(2, comm.size)], root=1)
            ) if operation == 'scatter_obj' else lambda: getattr(comm, operation)(obj)
    poor = 1 if operation == 'scatter_obj' else 0
    if comm.rank == poor:
        with little_memory(), pytest.raises(
                MemoryError, match=f'rank {poor} cannot allocate .* for the message from rank 1'):
            call()
    else:
        result = call()
        if operation == 'allgather_obj':
            assert result[1]['x'].size == SIZE
    assert comm.allgather_obj(comm.rank) == list(range(comm.size))


@pytest.mark.mpi(min_size=2)
def test_broadcast(comm):
    """All ranks raise an error before data is sent, because some ranks forward the data."""
    with little_memory() if comm.rank == 1 else contextlib.nullcontext(), pytest.raises(
            MemoryError, match='bcast_obj failed on rank 1'):
        comm.bcast_obj(PAYLOADS['object'] if comm.rank == 0 else None)
    assert comm.allgather_obj(comm.rank) == list(range(comm.size))
