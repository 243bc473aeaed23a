"""An error of one rank after the ranks have compared their calls is raised on all ranks."""

import functools
import os
import sys

import chainer
import numpy as np
import pytest
from jobs import run_job
from mpi4py import MPI

import chainermn
from chainermn._consistency import consistency_check
from chainermn._operations import table
from chainermn._transport import array_buffers, elementwise, packing

PACKAGE = os.path.dirname(chainermn.__file__) + os.sep
SIZE = MPI.COMM_WORLD.size
LARGE = 2**17  # bytes
N = LARGE // 4 + SIZE - LARGE // 4 % SIZE  # elements of float32

large = functools.cache(lambda: np.arange(N, dtype='f') % 7)
half = functools.cache(lambda: (np.arange(2 * N) % 7).astype('e'))
uneven = functools.cache(lambda: [np.ones(N + rank, 'f') for rank in range(SIZE)])


def model(array):
    link = chainer.Link()
    with link.init_scope():
        link.w = chainer.Parameter(array)
    link.w.grad = array.copy('K')
    return link


def strided(x):
    """The same values, not contiguous."""
    return np.stack([x, x], -1)[..., 0]


# Calls that need memory, by operation.
CALLS = {
    'bcast': [lambda comm: comm.bcast(large()), lambda comm: comm.bcast(strided(large()))],
    'gather': [lambda comm: comm.gather(large()),
               lambda comm: comm.gather(uneven()[comm.rank], SIZE - 1)],
    'allgather': [lambda comm: comm.allgather(strided(large())),
                  lambda comm: comm.allgather(uneven()[comm.rank])],
    'alltoall': [lambda comm: comm.alltoall([large()] * SIZE),
                 lambda comm: comm.alltoall(uneven())],
    'scatter': [lambda comm: comm.scatter([large()] * SIZE), lambda comm: comm.scatter(uneven())],
    'allreduce': [lambda comm: comm.allreduce(large()), lambda comm: comm.allreduce(half()),
                  lambda comm: comm.allreduce(large(), 'max'),
                  lambda comm: comm.allreduce(strided(large()))],
    'allreduce_many': [lambda comm: comm.allreduce_many([large(), half(), large()]),
                       lambda comm: comm.allreduce_many([large(), strided(large())], 'min')],
    'multi_node_mean': [lambda comm: comm.multi_node_mean(large())],
    'reduce': [lambda comm: comm.reduce(large()), lambda comm: comm.reduce(half(), 'max')],
    'reduce_scatter': [lambda comm: comm.reduce_scatter([large()] * SIZE),
                       lambda comm: comm.reduce_scatter([half()] * SIZE, 'max')],
    'bcast_obj': [lambda comm: comm.bcast_obj(large()), lambda comm: comm.bcast_obj(b'x' * 2**25)],
    'bcast_data': [lambda comm: comm.bcast_data(model(large()))],
    'multi_node_mean_grad': [
        lambda comm: comm.multi_node_mean_grad(model(half())),
        lambda comm: comm.multi_node_mean_grad(model(np.tile(large(), 2)),
                                               compression='fp16')],
    # These need no memory, or nobody waits for a rank without it.
    'gather_obj': [], 'allgather_obj': [], 'scatter_obj': [], 'allreduce_obj': [], 'barrier': [],
    'split': [], 'new_group': [], 'finalize': [],
}

# What fails on one rank.
POINTS = {
    'empty': (np, 'empty'), 'concatenate': (np, 'concatenate'), 'pack': (packing, 'pack'),
    'to_buffer': (array_buffers, 'to_buffer'), 'ordered_bits': (elementwise, '_ordered_bits')}
#: Operations of which the transport on shared memory has its own version.
OF_TRANSPORTS = {'bcast', 'allreduce', 'allreduce_many', 'bcast_data', 'multi_node_mean_grad'}
#: Operations that may never fail, since shared memory needs no memory for each of them.
SELDOM = {'bcast_data', 'multi_node_mean_grad'}


def test_every_operation_is_here():
    assert set(CALLS) == set(table.collectives())


@pytest.fixture
def comms_of_test():
    comms = [chainermn.create_communicator(name) for name in ('naive', 'flat')]
    yield comms
    for comm in comms:
        comm.finalize()


@pytest.mark.mpi(min_size=2)
def test_no_memory_on_one_rank(comms_of_test, monkeypatch, check_usable):
    monkeypatch.setattr(consistency_check, '_LARGE', LARGE)
    failed = set()
    for comm in comms_of_test:
        for n, (operation, calls) in enumerate(CALLS.items()):
            if comm is not comms_of_test[0] and operation not in OF_TRANSPORTS:
                continue
            for k, call in enumerate(calls):
                expected = call(comm)  # allocates what the transport keeps
                for m, point in enumerate(POINTS):
                    odd = (n + m + k) % comm.size
                    with monkeypatch.context() as patch:
                        raised = _fail_on_one_rank(patch, point, comm.rank == odd)
                        if any(comm.mpi_comm.allgather(_attempt(call, comm, raised))):
                            failed.add(operation)
                    errors = comm.mpi_comm.allgather(raised.errors)
                    assert len(set(errors)) == 1, (operation, point, errors)
                    if raised.errors:
                        assert f'{operation} failed on rank {odd} (no data was sent)' in (
                            raised.errors)
                check_usable(comm)
                _check_equal(call(comm), expected)
    assert failed >= {name for name, calls in CALLS.items() if calls} - SELDOM


class _Raised:
    errors = ''  # the text of the error of a call


def _fail_on_one_rank(patch, point, is_here):
    module, name = POINTS[point]
    original = getattr(module, name)
    if is_here:
        def failing(*args, **kwargs):
            is_ours = sys._getframe(1).f_code.co_filename.startswith(PACKAGE)
            has_memory = name == 'concatenate' and len(args) > 2  # out
            if is_ours and not has_memory:
                raise MemoryError(f'no memory in {point}')
            return original(*args, **kwargs)

        patch.setattr(module, name, failing)
    return _Raised()


def _attempt(call, comm, raised):
    """Call an operation; return whether it failed."""
    try:
        call(comm)
    except MemoryError as error:
        raised.errors = str(error)
    return bool(raised.errors)


def _check_equal(result, expected):
    if isinstance(expected, (tuple, list)):
        for one, other in zip(result, expected, strict=True):
            _check_equal(one, other)
    elif expected is not None:
        np.testing.assert_array_equal(result, expected)


SMALL = '''
import numpy as np, chainermn, time
comm = chainermn.create_communicator('naive')
empty = np.empty
def failing(*args, **kwargs):
    raise MemoryError('no memory here')
if comm.rank == 1:
    np.empty = failing
try:
    comm.allgather(np.ones(2000))
except MemoryError:
    pass
np.empty = empty
comm.barrier()
print('end')
'''


@pytest.mark.mpi_skip
def test_no_memory_for_a_small_transfer_ends_the_job(tmp_path):
    done = run_job(tmp_path, SMALL)
    assert done.returncode != 0 and 'end' not in done.stdout.split()
    assert ('allgather failed on this rank while the others were waiting for its data'
            in done.stdout)
    assert 'Use less memory, for example by running fewer ranks per node.' in done.stdout
    assert 'MemoryError: no memory here' in done.stdout
