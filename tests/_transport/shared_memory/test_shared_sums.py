"""Sums and copies in shared memory: bitwise equal to a sum in the order of nodes and ranks."""

import re
import resource
import time
import warnings

import chainer
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from jobs import run_on_hosts
from mpi4py import MPI

import chainermn
from chainermn._transport import topology
from chainermn._transport.array_list import ArrayList
from chainermn._transport.base import Group
from chainermn._transport.shared_memory import shared_sums
from chainermn._transport.shared_memory.shared_memory_transport import SharedMemoryTransport

pytestmark = pytest.mark.every_size

CHUNK = 512  # bytes: small, so that small arrays fill many
MPI_COMM = MPI.COMM_WORLD
RANK, SIZE = MPI_COMM.rank, MPI_COMM.size
FLOATS = st.sampled_from(['float16', 'float32', 'float64'])
# Around the 64 or 128 elements of a chunk, and many small ones in a chunk.
SIZES = st.one_of(
    st.lists(st.one_of(st.integers(0, 9), st.integers(60, 68), st.integers(120, 400)),
             min_size=1, max_size=30),
    st.lists(st.integers(0, 9), min_size=9, max_size=30))


def create(mpi_comm, chunk=CHUNK):
    place = topology.discover(mpi_comm)
    return shared_sums.create(mpi_comm, place, chunk or shared_sums.chunk_size(place))


@pytest.fixture(scope='module', params=range(1, min(SIZE, 3) + 1), ids='{} hosts'.format)
def memory(request):
    """Shared memory of ranks on one host, or as if they were on several."""
    mpi_comm = MPI_COMM.Dup()
    hosts = request.param
    place = topology.of(RANK, [topology.Place(f'node{rank % hosts}', 1) for rank in range(SIZE)])
    memory = shared_sums.create(mpi_comm, place, CHUNK)
    yield memory
    memory.free()
    mpi_comm.Free()


def arrays_of(rank, sizes, dtype, seed=0):
    """The values depend on the size, so that values from an earlier exchange are detected."""
    random = np.random.RandomState([rank, seed, *sizes])
    return [random.normal(0, 10, size).astype(dtype) for size in sizes]


def summed(memory, per_rank, scale=None):
    """The sum of the arrays of all ranks: of each node in rank order, then of the nodes."""
    results = []
    nodes = [np.flatnonzero(np.equal(memory._nodes, node)) for node in sorted({*memory._nodes})]
    for arrays in zip(*per_rank, strict=True):
        dtype = arrays[0].dtype
        wide = np.promote_types(dtype, np.float32)
        total = sum(sum(arrays[rank].astype(wide) for rank in ranks) for ranks in nodes)
        if scale is not None:
            total *= wide.type(scale)
        results.append(total.astype(dtype))
    return results


def check_equal(arrays, expected):
    for array, other in zip(arrays, expected, strict=True):
        assert (array.dtype, array.shape) == (other.dtype, other.shape)
        assert array.tobytes() == other.tobytes()


def owners_of(sizes, order, n=SIZE):
    """An owner for each array, among the first ``n`` ranks."""
    return sorted(order.randrange(n) for _ in sizes)


def check_sum(memory, sizes, dtype, scale, results=None):
    """The sum replaces the arrays, or is written to other arrays and leaves these unchanged."""
    per_rank = [arrays_of(rank, sizes, dtype) for rank in range(SIZE)]
    own = [array.copy() for array in per_rank[RANK]]
    for array in own:
        array.flags.writeable = results is None
    memory.sum(own, results, scale)
    check_equal(own if results is None else results, summed(memory, per_rank, scale))
    if results is not None:
        check_equal(own, per_rank[RANK])


def check_sum_for_owners(memory, sizes, dtype, scale, owners):
    """The owner gets the bits of a sum for all ranks."""
    per_rank = [arrays_of(rank, sizes, dtype) for rank in range(SIZE)]
    expected = summed(memory, per_rank, scale)
    arrays = per_rank[RANK]
    memory.sum_for_owners(arrays, tuple(owners), scale)
    own = [n for n, owner in enumerate(owners) if owner == RANK]
    check_equal([arrays[n] for n in own], [expected[n] for n in own])


@hypothesis.settings(max_examples=20)
@hypothesis.given(sizes=SIZES, dtype=FLOATS, scale=st.sampled_from([None, 1 / SIZE, 1 / 3]),
                  way=st.sampled_from(['in place', 'into others', 'all own', 'half own']),
                  order=st.randoms(use_true_random=False))
def test_sums(memory, sizes, dtype, scale, way, order):
    if way.endswith('own'):
        owners = owners_of(sizes, order, SIZE if way == 'all own' else 1 + SIZE // 2)
        check_sum_for_owners(memory, sizes, dtype, scale, owners)
    else:
        results = [np.full(size, 7, dtype) for size in sizes] if way == 'into others' else None
        check_sum(memory, sizes, dtype, scale, results)


@pytest.mark.parametrize('chunk, count', [(8 * SIZE, 50), (4096, 1), (None, 50)])
def test_chunk_sizes(chunk, count):
    """In the smallest chunks, there is no room for a part of each rank."""
    mpi_comm = MPI_COMM.Dup()
    memory = create(mpi_comm, chunk)
    sizes = [70 if chunk == 8 * SIZE else 200000 // count] * count * SIZE
    check_sum(memory, sizes[:count], 'float32', .5)
    check_sum_for_owners(memory, sizes, 'float64', .5, sorted([*range(SIZE)] * count))
    memory.free()
    mpi_comm.Free()


def layouts(dtype):
    """Views of 6 x 9 elements in several layouts, each with its base array."""
    for make in (lambda x: x[:6, ::2], lambda x: x.T[:6, 1:10], lambda x: x[5::-1, 8::-1],
                 lambda x: x[3:9, 2:11], lambda x: x.reshape(-1)[:54].reshape(6, 9)):
        base = np.full((18, 18), -1, dtype)
        yield base, make(base)


@pytest.mark.parametrize('operation, dtype', [
    ('sum', 'float16'), ('sum into others', 'float64'), ('copy', 'float32')])
def test_arrays_that_are_not_contiguous(memory, dtype, operation):
    bases, arrays = zip(*layouts(dtype), strict=True)
    values = np.arange(54).reshape(6, 9)
    for array in arrays:
        array[...] = values + RANK
    if operation == 'sum into others':
        bases, results = zip(*layouts(dtype), strict=True)
        memory.sum(arrays, results)
    else:
        results = arrays
        if operation == 'copy':
            memory.copy(arrays, (0,) * len(arrays))
        else:
            memory.sum(arrays)
    expected = values if operation == 'copy' else SIZE * values + SIZE * (SIZE - 1) // 2
    for base, array in zip(bases, results, strict=True):
        np.testing.assert_array_equal(array, expected)
        assert (base == -1).sum() == base.size - array.size


def check_copy(memory, sizes, dtype, owners):
    def arrays(rank):
        random = np.random.RandomState([rank, *sizes])
        return [np.frombuffer(random.bytes(size * np.dtype(dtype).itemsize), dtype).copy()
                for size in sizes]

    own = arrays(RANK)
    memory.copy(own, owners)
    check_equal(own, [arrays(owner)[n] for n, owner in enumerate(owners)])


@hypothesis.settings(max_examples=6)
@hypothesis.given(sizes=SIZES, code=st.sampled_from('?bhHiIqQefdFD'), root=st.integers(0, SIZE - 1),
                  order=st.randoms(use_true_random=False))
def test_copy(memory, sizes, code, root, order):
    check_copy(memory, sizes, code, (root,) * len(sizes))
    check_copy(memory, sizes, code, tuple(owners_of(sizes, order)))


def test_random_delays(memory):
    """Each rank is late at random, so that others get ahead as far as allowed."""
    mine = np.random.RandomState(RANK)
    common = np.random.RandomState(0)
    for n in range(12):
        sizes = common.randint(0, 300, common.randint(1, 20))
        if mine.randint(3) == 0:
            time.sleep(.001 * mine.randint(4))
        if n % 3:
            check_sum(memory, sizes, np.float32, None)
        else:
            check_copy(memory, sizes, np.float32, (0,) * len(sizes))


class LateRank(np.ndarray):
    """An array that delays, or raises, whenever a piece of it is accessed."""

    def __getitem__(self, key):
        if self.size > 1000:
            self.act()
        return super().__getitem__(key)


def test_delay_within_a_chunk(memory):
    class Array(LateRank):
        def act(self):
            time.sleep(.001)

    for late in range(SIZE):
        per_rank = [arrays_of(rank, [3000], np.float32, late) for rank in range(SIZE)]
        expected = summed(memory, per_rank)
        array = per_rank[RANK][0]
        memory.sum([array.view(Array) if late == RANK else array])
        check_equal([array], expected)


@pytest.mark.mpi(min_size=2)
def test_failed_rank_is_named():
    class Array(LateRank):
        pieces = 0

        def act(self):
            type(self).pieces += 1
            if self.pieces == 3:  # early: the others need the remaining pieces
                raise KeyError('lost')

    mpi_comm = MPI_COMM.Dup()
    memory = create(mpi_comm)
    odd = SIZE - 1
    array = np.zeros(30000, np.float32)
    with pytest.raises((KeyError, RuntimeError)) as caught:
        memory.sum([array.view(Array) if odd == RANK else array])
    if odd == RANK:
        assert type(caught.value) is KeyError
    else:
        assert re.match(rf'rank {odd} \(.*\) failed during an operation$',
                        str(caught.value))
    MPI_COMM.Barrier()
    for operation in (memory.sum, lambda arrays: memory.copy(arrays, (0,) * len(arrays))):
        with pytest.raises(RuntimeError, match='an earlier operation') as caught:
            operation([array])
    memory.free()


def test_too_little_space_gives_one_warning():
    mpi_comm = MPI_COMM.Dup()
    with pytest.warns(RuntimeWarning, match='no shared memory on ranks? 0') as caught:
        assert create(mpi_comm, 1 << 50) is None
    assert len(caught) == 1
    assert len(set(MPI_COMM.allgather(str(caught[0].message)))) == 1
    assert create(mpi_comm, CHUNK) is not None


@pytest.mark.mpi(min_size=2)
def test_without_shared_memory_flat_uses_mpi():
    """The first rank of the node may not create large files, such as shared memory."""
    comm = chainermn.create_communicator('flat')
    model = chainer.links.Linear(3, 2)

    def mean():
        for param in model.params():
            param.grad = np.full(param.shape, RANK + 1, np.float32)
        comm.multi_node_mean_grad(model)
        for param in model.params():
            np.testing.assert_array_equal(param.grad, np.float32((SIZE + 1) / 2))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if RANK == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.warns(RuntimeWarning, match='no shared memory on rank') as caught:
            mean()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caught) == 1
    assert len(set(MPI_COMM.allgather(str(caught[0].message)))) == 1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        mean()
    comm.bcast_data(model)
    comm.finalize()


# --- programs ----------------------------------------------------------------------------------

SEVERAL_NODES = """
import zlib
import numpy as np
import chainer
import chainermn

comm = chainermn.create_communicator('flat')
size = comm.size
model = chainer.links.Linear(700, 1000)
comm.bcast_data(model)
for param in model.params():
    param.grad = param.array * (comm.rank + 1)
comm.multi_node_mean_grad(model)
for param in model.params():
    np.testing.assert_allclose(param.grad, param.array * (size + 1) / 2, rtol=1e-6)
gradients = [np.clip(param.array, -.05, .05) for param in model.params()]
means = [gradient * (size + 1) / 2 for gradient in gradients]
for kind, error, steps in [('fp16', 1e-3, 1), ('bf16', 1e-2, 1), ('2bit', .08, 20)]:
    compressor = chainermn.communicators.compression.get(kind)
    sent = [np.zeros_like(mean) for mean in means]
    for _ in range(steps):
        for param, gradient in zip(model.params(), gradients):
            param.grad = gradient * (comm.rank + 1)
        comm.multi_node_mean_grad(model, compression=compressor)
        found = [param.grad for param in model.params()]
        assert len(set(comm.allgather_obj(tuple(map(zlib.crc32, found))))) == 1
        assert found[0].tobytes() != means[0].tobytes()
        sent = [total + x for total, x in zip(sent, found)]
    for total, mean in zip(sent, means):
        np.testing.assert_allclose(total / steps, mean, rtol=error, atol=error)
if comm.rank == 0:
    print('all is well on', comm.inter_size, 'nodes')
comm.finalize()
"""


@pytest.mark.slow
@pytest.mark.mpi_skip
@pytest.mark.sample(1)
@pytest.mark.parametrize('hosts', [
    'abab', 'abc', 'aabbb',
    *(pytest.param(hosts, marks=pytest.mark.full) for hosts in ('aabb', 'abb', 'aaa'))])
def test_several_nodes(tmp_path, hosts):
    result = run_on_hosts(tmp_path, SEVERAL_NODES, hosts)
    assert result.returncode == 0, result.stderr
    assert f'all is well on {len(set(hosts))} nodes' in result.stdout
    assert result.stderr.count('compression slows down communication') == (len(set(hosts)) == 1)


KILLED = """
import os, signal, sys, threading
import numpy as np
import chainermn
from mpi4py import MPI
from chainermn._transport import topology
from chainermn._transport.shared_memory import shared_sums

mpi_comm = MPI.COMM_WORLD
place = topology.discover(mpi_comm)
memory = shared_sums.create(mpi_comm, place, shared_sums.chunk_size(place))
array = np.zeros(10**6, np.float32)
memory.sum([array])
if mpi_comm.rank == 1:
    threading.Timer(.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
try:
    while True:
        memory.sum([array])
except RuntimeError as error:
    # mpiexec may lose output at the end of a job.
    with open(f'{sys.argv[1]}/{mpi_comm.rank}', 'w') as file:
        file.write(str(error))
    raise
"""


@pytest.mark.slow
@pytest.mark.mpi_skip
@pytest.mark.parametrize('is_hidden', [False, True])
def test_killed_rank_ends_the_job(is_hidden, tmp_path):
    """Also if a shell hides the killed process from mpiexec."""
    shell = ('sh', '-c', '"$0" "$@"; sleep 1000') if is_hidden else ()
    result = run_on_hosts(tmp_path, KILLED, 'aaa', str(tmp_path), shell=shell)
    assert result.returncode != 0
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert texts or not is_hidden
    for text in texts:
        assert re.match(r'rank 1 \(process .*\) exited during an operation$', text)


def test_small_exchanges_need_little_memory():
    """The transport allocates memory for large chunks before the first exchange that needs it."""
    mpi_comm = MPI_COMM.Dup()
    group = Group(mpi_comm, mpi_comm, topology.discover(mpi_comm), lambda: None)
    transport = SharedMemoryTransport(group)
    small, large = shared_sums.SMALL_EXCHANGE // 4, shared_sums.SMALL_EXCHANGE
    chunks = []
    for count in (10, small, small + 1, large, 10):
        x = np.full(count, RANK + 1, np.float32)
        transport.mean(ArrayList.of([x]))
        np.testing.assert_array_equal(x, np.float32((SIZE + 1) / 2))
        chunks.append(transport._shared and transport._shared.chunk)
    if SIZE > 1:
        full = shared_sums.chunk_size(group.topology)
        assert chunks == [shared_sums.SMALL_CHUNK] * 2 + [full] * 3
    transport.free()
    mpi_comm.Free()

