"""The exchange of calls and small data: its messages, and what one rank learns of the others."""

import math
import queue
import threading

import numpy as np
import pytest
from mpi4py import MPI

from chainermn._consistency import signature_exchange
from chainermn._consistency.signature_exchange import MISMATCH, SignatureExchange
from chainermn._operations.call_signature import IDENTIFIER_SIZE

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
CALL, OTHER = b'call-1', b'call-2'


@pytest.fixture(scope='module')
def mpi_comm():
    mpi_comm = WORLD.Dup()
    yield mpi_comm
    mpi_comm.Free()


@pytest.fixture
def exchanged(mpi_comm):
    return SignatureExchange(mpi_comm, 0)


def simulated(size):
    """Exchanges of simulated ranks, and a function that runs one call on each in lockstep.

    The calls run in threads; only the messages between them are replaced.
    """
    queues = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}

    class Comm:
        def __init__(self, rank):
            self.rank, self.size, self.received = rank, size, []

        def Send(self, sent, dest, _):  # noqa: N802
            queues[self.rank, dest].put(bytes(sent))

        def Irecv(self, buffer, source, _):  # noqa: N802
            return Request(queues[source, self.rank], buffer, self.received)

    class Request:
        def __init__(self, messages, buffer, received):
            self.messages, self.buffer, self.received = messages, buffer, received

        def Test(self, _):  # noqa: N802
            try:
                self.Wait(None, timeout=.01)
            except queue.Empty:
                return False
            return True

        def Wait(self, _, timeout=60):  # noqa: N802
            message = self.messages.get(timeout=timeout)
            self.buffer[:len(message)] = message
            self.received.append(len(message))

    comms = [Comm(rank) for rank in range(size)]

    def run(calls):
        results = {}
        threads = [threading.Thread(target=lambda rank=rank: results.update({
            rank: calls[rank](SignatureExchange(comms[rank], 96))})) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(size)]

    return comms, run


@pytest.mark.mpi_skip
@pytest.mark.parametrize('size', [1, 2, 3, 5, 8, 13])
def test_each_rank_hears_of_all_others(size):
    data = [bytes([65 + rank]) for rank in range(size)]
    _, run = simulated(size)
    assert run([lambda each: each.matches(CALL)] * size) == [True] * size
    assert run([lambda each, mine=mine: [*each.gather_equal(CALL, mine)] for mine in data]) == [
        data] * size
    lengths = [mine * (rank % 3) for rank, mine in enumerate(data)]
    assert run([lambda each, mine=mine: [*each.gather(CALL, mine)] for mine in lengths]) == [
        lengths] * size
    for root in range(size):
        assert run([lambda each, mine=mine, root=root: each.bcast(CALL, mine, root)
                    for mine in data]) == [data[root]] * size


@pytest.mark.mpi_skip
@pytest.mark.parametrize('size', [2, 3, 5, 8])
def test_all_ranks_learn_that_one_differs(size):
    _, run = simulated(size)
    for odd in range(size):
        def call_of(rank, odd=odd):
            return OTHER if rank == odd else CALL

        def different(each, rank, odd=odd):
            return each.matches(MISMATCH) if rank == odd else each.gather(CALL, b'data')

        assert run([lambda each, rank=rank: each.matches(call_of(rank))
                    for rank in range(size)]) == [False] * size
        assert run([lambda each, rank=rank: each.gather_equal(call_of(rank), b'x')
                    for rank in range(size)]) == [None] * size
        assert run([lambda each, rank=rank: each.bcast(call_of(rank), b'x', 0)
                    for rank in range(size)]) == [None] * size
        assert {*run([lambda each, rank=rank: different(each, rank) or None
                      for rank in range(size)])} == {None}


@pytest.mark.mpi_skip
@pytest.mark.parametrize('size', [16, 32])
def test_the_number_of_messages_and_bytes(size):
    comms, run = simulated(size)
    run([lambda each: each.matches(CALL)] * size)
    steps = math.ceil(math.log2(size))
    assert {tuple(comm.received) for comm in comms} == {(IDENTIFIER_SIZE,) * steps}
    assert math.ceil(math.log2(1024)) * IDENTIFIER_SIZE <= 64  # at 1,024 ranks


def test_real_messages(exchanged):
    assert exchanged.matches(CALL)
    assert exchanged.matches(OTHER if RANK == 0 else CALL) == (SIZE == 1)
    data = [b'%03d' % rank for rank in range(SIZE)]
    assert list(exchanged.gather_equal(CALL, data[RANK])) == data
    assert exchanged.bcast(CALL, data[RANK], SIZE - 1) == data[-1]


def test_capacity(exchanged):
    assert exchanged.capacity == min(
        signature_exchange._MAX_BYTES, signature_exchange._MAX_TOTAL // SIZE)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('polls, spins', [
    (0, 1), (1, 0), (1, 1), (signature_exchange._POLLS, signature_exchange.SPINS)])
def test_wait_returns_with_the_message_and_its_status(monkeypatch, polls, spins):
    monkeypatch.setattr(signature_exchange, '_POLLS', polls)
    mpi_comm, status, received = WORLD.Dup(), MPI.Status(), np.zeros(3, int)
    if WORLD.rank == 1:
        request = mpi_comm.Irecv(received, MPI.ANY_SOURCE, 5)
        mpi_comm.Send(np.zeros(1), 0)  # now rank 0 may send
        signature_exchange.wait(request, status, spins)
        assert (status.source, status.tag, received.tolist()) == (0, 5, [1, 2, 3])
        assert request == MPI.REQUEST_NULL
    elif WORLD.rank == 0:
        signature_exchange.wait(mpi_comm.Irecv(np.zeros(1), 1))
        mpi_comm.Send(np.array([1, 2, 3]), 1, 5)
    mpi_comm.Free()
