"""The consistency check through shared memory: the same answers as by messages."""

import ctypes
import mmap
import signal
import sys
import time

import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn._consistency import signature_exchange
from chainermn._consistency.signature_exchange import MISMATCH, SignatureExchange
from chainermn._process import runtime
from chainermn._transport.shared_memory import shared_lines

pytestmark = pytest.mark.every_size

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
CALL, OTHER = b'call-1', b'call-2'


@pytest.fixture(params=[0, 7, 10**6])
def exchanged(request, monkeypatch):
    """Exchanges that switch to shared memory at once, later, or never."""
    monkeypatch.setattr(signature_exchange, '_MESSAGES', request.param)
    mpi_comm = WORLD.Dup()
    exchanged = SignatureExchange(mpi_comm, 96, shared_lines.create)
    yield exchanged
    exchanged.free()
    mpi_comm.Free()
    assert (exchanged._memory is not None) == (request.param < 10 and SIZE > 1)


def test_messages_of_all_ranks(exchanged):
    """Each rank is late at random."""
    random = np.random.RandomState(RANK)
    for n in range(30):
        if random.randint(4) == 0:
            time.sleep(.001 * random.randint(3))
        same = [b'%03d %03d' % (n, rank) for rank in range(SIZE)]
        lengths = [each * (rank + n) for rank, each in enumerate(same)]
        lengths[n % SIZE] = bytes([n]) * (96 + exchanged.capacity)
        assert exchanged.matches(CALL)
        assert [*map(bytes, exchanged.gather_equal(CALL, same[RANK]))] == same
        assert [*map(bytes, exchanged.gather(CALL, lengths[RANK]))] == lengths
        assert exchanged.bcast(CALL, same[RANK], n % SIZE) == same[n % SIZE]


@pytest.mark.mpi(min_size=2)
def test_all_ranks_learn_that_one_differs(exchanged):
    """Whichever calls they are; and later exchanges work."""
    for n in range(30):
        odd = n % SIZE
        calls = [lambda call: exchanged.matches(call) or None,
                 lambda call: exchanged.gather_equal(call, b'x'),
                 lambda call: exchanged.gather(call, b'data' * RANK),
                 lambda call: exchanged.bcast(call, b'data', 0)]
        if odd == RANK:
            different = exchanged.matches(MISMATCH) or None if n % 2 else calls[n % 3](OTHER)
        else:
            different = calls[n // 2 % 4](CALL)
        assert different is None
        assert exchanged.matches(MISMATCH) is False or SIZE == 1
        if n % 3 == 0:
            assert exchanged.matches(CALL)


@pytest.mark.mpi(min_size=2)
def test_an_interrupted_rank_is_in_step(monkeypatch):
    monkeypatch.setattr(signature_exchange, '_MESSAGES', 0)
    mpi_comm = WORLD.Dup()
    exchanged = SignatureExchange(mpi_comm, 96, shared_lines.create)
    assert exchanged.matches(CALL)
    if RANK == 1:
        def interrupt(*_):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, .1)
        with pytest.raises(KeyboardInterrupt):
            exchanged.matches(CALL)
        signal.signal(signal.SIGALRM, before)
    else:
        time.sleep(.3)
        assert exchanged.matches(CALL)
    data = [b'%03d' % rank for rank in range(SIZE)]
    for _ in range(3):
        assert exchanged.gather_equal(CALL, data[RANK]) == data
    exchanged.free()
    mpi_comm.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('name', ['check_space', 'Window'])
def test_messages_go_on_without_memory(monkeypatch, name):
    """One rank cannot allocate shared memory, so all ranks keep using messages."""
    def fail(*_, **__):
        raise OSError('no space')

    monkeypatch.setattr(signature_exchange, '_MESSAGES', 0)
    if name == 'Window' or RANK == 1:
        monkeypatch.setattr(shared_lines, name, fail)
    mpi_comm = WORLD.Dup()
    exchanged = SignatureExchange(mpi_comm, 96, shared_lines.create)
    for _ in range(3):
        assert exchanged.matches(CALL)
        assert not exchanged.matches(OTHER if RANK else CALL)
    assert exchanged._memory is None
    exchanged.free()
    mpi_comm.Free()


@pytest.mark.mpi(min_size=2)
def test_errors_of_a_communicator_that_uses_it():
    comm = chainermn.create_communicator('naive')
    for _ in range(signature_exchange._MESSAGES + 2):
        assert comm.allreduce_obj(1) == SIZE
    assert comm._context.check.exchange._memory is not None
    for _ in range(2):
        with pytest.raises(chainermn.CollectiveMismatchError, match='barrier'):
            comm.barrier() if RANK == SIZE - 1 else comm.allgather_obj(RANK)
        with pytest.raises(ValueError, match='rank'):
            comm.bcast_obj(RANK, root=-1 if RANK == 0 else 0)
        assert comm.allgather_obj(RANK) == [*range(SIZE)]
        np.testing.assert_array_equal(comm.allreduce(np.ones(3, 'f')), np.full(3, SIZE, 'f'))
    half = comm.split(RANK % 2, RANK)
    for _ in range(signature_exchange._MESSAGES + 2):
        half.barrier()
    half.finalize()
    comm.finalize()


@pytest.mark.mpi(min_size=2)
def test_a_program_with_many_communicators_keeps_them_for_other_uses(monkeypatch):
    monkeypatch.setattr(shared_lines, '_MEMORIES', 3)
    mpi_comm = WORLD.Dup()
    with runtime.replaced():  # other tests may have some
        made = [shared_lines.create(mpi_comm, 10) for _ in range(3)]
        assert None not in made and shared_lines.create(mpi_comm, 10) is None
        made.pop().free()
        made.append(shared_lines.create(mpi_comm, 10))
        for each in made:
            each.free()
    mpi_comm.Free()


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_at_the_limit_of_communicators_there_is_no_memory():
    """MPICH has about 2,000, Open MPI many more."""
    mpi_comms = []
    try:
        while len(mpi_comms) < 3000:
            mpi_comms.append(WORLD.Dup())
    except MPI.Exception:
        assert shared_lines.create(WORLD, 10) is None
    for mpi_comm in mpi_comms:
        mpi_comm.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(sys.platform != 'linux', reason='of mincore')
def test_no_page_is_missing_when_dev_shm_is_full_later():
    lines = shared_lines.create(WORLD, 5 * mmap.PAGESIZE)
    for segment in lines._window.segments:
        begin = segment.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        length = segment.ctypes.data + segment.size - begin
        pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        assert not ctypes.CDLL(None).mincore(
            ctypes.c_void_p(begin), ctypes.c_size_t(length), pages)
        assert all(page & 1 for page in pages)
    lines.free()
