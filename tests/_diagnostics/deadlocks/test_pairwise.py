"""Ranks that wait for each other in chainermn.functions raise; those that are slow do not."""

import contextlib
import gc
import os
import random
import time

import chainer
import chainer.functions as F
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
import chainermn.functions as mnf
from chainermn._collectives import point_to_point
from chainermn._diagnostics.deadlocks import pairwise
from chainermn._diagnostics.flight_recorder import MessageRecord

pytestmark = pytest.mark.usefixtures('no_timer')


@pytest.fixture
def comm():
    """One for each test, since a deadlock leaves messages behind."""
    comm = chainermn.create_communicator('naive')
    if comm.size < 2:
        pytest.skip('takes two ranks')
    return comm


@pytest.fixture
def at_once(monkeypatch):
    """Notices are sent without a grace period, as if all ranks were slow."""
    monkeypatch.setattr(pairwise, '_GRACE', 0)


def line_of(text):
    with open(__file__, encoding='utf-8') as file:
        return next(f'{os.path.basename(__file__)}:{number}' for number, line
                    in enumerate(file, 1) if line.endswith(f'# {text}\n'))


def assert_both_raise(comm, call, *texts):
    """Call a function on the first two ranks, which raise the same error."""
    if comm.rank > 1:
        return
    with pytest.raises(ValueError, match='functions: ranks 0 and 1 wait for each other') as info:
        call()
    for text in texts:
        assert text in str(info.value)
    comm.mpi_comm.send(str(info.value), 1 - comm.rank)
    assert comm.mpi_comm.recv(source=1 - comm.rank) == str(info.value)


def variable(size=2):
    return chainer.Variable(np.ones(size, np.float32))


@pytest.mark.sample(1)
@pytest.mark.parametrize('size', [2, 100_000])
def test_sender_without_backward(comm, size):
    """It sends the next one while the receiver sends the gradient."""
    def call():
        for _ in range(2):
            if comm.rank == 0:
                mnf.send(variable(size), comm, 1)  # without backward
            else:
                F.sum(mnf.recv(comm, 0)).backward()  # with backward

    there = line_of('with backward')
    assert_both_raise(
        comm, call,
        f'  rank 0: send to rank 1 with tag 0, called at {line_of("without backward")}\n',
        f'  rank 1: backward, called at {there}, sends the gradient of recv from rank 0 with tag '
        f'0, called at {there}\n', 'send an array (x.array) if no gradient is needed')


def test_receiver_without_backward(comm):
    """It receives the next one while the sender waits for the gradient."""
    def call():
        for _ in range(2):
            if comm.rank == 0:
                delegate = mnf.send(variable(), comm, 1)  # before backward
                delegate.backward()  # waits
            else:
                mnf.recv(comm, 0)  # next

    assert_both_raise(
        comm, call,
        f'  rank 0: backward, called at {line_of("waits")}, waits for the gradient of send to '
        f'rank 1 with tag 0, called at {line_of("before backward")}\n'
        f'  rank 1: recv from rank 0 with tag 0, called at {line_of("next")}\n')


@pytest.mark.sample(1)
@pytest.mark.parametrize('tag', [0, 1])
def test_both_receive_first(comm, tag):
    assert_both_raise(comm, lambda: mnf.recv(comm, 1 - comm.rank, tag=tag * comm.rank))


@pytest.mark.sample(1)
@pytest.mark.parametrize('tag', [0, 1])
def test_both_send_first(comm, tag):
    assert_both_raise(
        comm, lambda: mnf.send(np.ones(2, 'f'), comm, 1 - comm.rank, tag=tag * comm.rank))


def test_tags_that_differ(comm):
    def call():
        if comm.rank == 0:
            mnf.send(variable(), comm, 1, tag=3)
        else:
            mnf.recv(comm, 0, tag=4)

    assert_both_raise(comm, call, 'rank 0: send to rank 1 with tag 3',
                      'rank 1: recv from rank 0 with tag 4')


def test_both_wait_for_gradients(comm):
    def call():
        if comm.rank == 0:
            delegate = mnf.send(variable(), comm, 1)
            mnf.recv(comm, 1)
        else:
            mnf.recv(comm, 0)
            delegate = mnf.send(variable(), comm, 0)
        delegate.backward()

    assert_both_raise(comm, call)


def test_after_an_error_the_ranks_go_on(comm, at_once):
    """What was said before it does not count any more."""
    if comm.rank > 1:
        return
    for _ in range(3):
        assert_both_raise(comm, lambda: mnf.recv(comm, 1 - comm.rank))
        for turn in 0, 1:
            if turn == comm.rank:
                mnf.send(np.ones(2, 'f'), comm, 1 - comm.rank)
            else:
                mnf.recv(comm, 1 - comm.rank)


def test_a_rank_that_is_late(comm, at_once):
    """The others wait for much longer than the grace period, for messages of all kinds."""
    late = 0.3
    if comm.rank == 0:
        time.sleep(late)
        comm.isend(np.ones(3), 1, 9)
        delegate = mnf.send(variable(), comm, 1)
        time.sleep(late)
        delegate.backward()
        time.sleep(late)
        F.sum(mnf.recv(comm, 1, tag=1)).backward()
        time.sleep(late)
        comm.send(np.ones(2), 1, 0)
        comm.send_obj(1, 1)
    elif comm.rank == 1:
        F.sum(mnf.recv(comm, 0)).backward()
        mnf.send(variable(), comm, 0, tag=1).backward()
        assert mnf.recv(comm, 0).shape == (2,)
        assert comm.recv(0, 9).shape == (3,)
        assert comm.recv_obj(0) == 1


class Message:
    """From one rank to another, by a function or by a method of the communicator."""

    def __init__(self, rng, number, size):
        self.number = number
        self.source, self.dest = rng.sample(range(size), 2)
        self.tag = rng.randrange(2)
        self.way = rng.choice(['gradient', 'gradient', 'array', 'send', 'isend', 'send_obj'])
        self.size = rng.choice([1, 3, point_to_point.INLINE])
        self.delays = [rng.choice([0, 0, 0, .002]) for _ in range(2)]


@pytest.mark.parametrize('is_dropped', [False, True])
def test_no_notice_reaches_a_later_communicator(at_once, is_dropped):
    """MPI gives a new communicator the number of one that was freed."""
    comm = chainermn.create_communicator('naive')
    if comm.size > 1 and comm.rank == 0:
        mnf.recv(comm, 1)  # sends a notice, which rank 1 never reads
    elif comm.rank == 1:
        time.sleep(.5)
        mnf.send(variable(), comm, 0)
        time.sleep(.1)
    MPI.COMM_WORLD.Barrier()
    if not is_dropped:
        comm.finalize()
    del comm
    gc.collect()
    chainermn.create_communicator('naive').finalize()
    later = [MPI.COMM_WORLD.Dup() for _ in range(8)]
    found = [n for n, mpi_comm in enumerate(later) if mpi_comm.Iprobe()]
    for mpi_comm in later:
        mpi_comm.Free()
    assert found == []


def play(comm, messages, rng):
    """Send messages one after the other, then gradients of some in the opposite order."""
    sent, received, pending = {}, {}, []
    for message in messages:
        value = np.full(message.size, message.number, np.float32)
        peer, tag = message.source, message.tag
        if comm.rank == message.source:
            time.sleep(message.delays[0])
            peer = message.dest
            if message.way == 'isend':
                pending.append(comm.isend(value, peer, 7))
            elif message.way == 'send_obj':
                comm.send_obj(message.number, peer, 8)
            elif message.way == 'send':
                comm.send(value, peer, tag)
            else:
                x = chainer.Variable(value) if message.way == 'gradient' else value
                sent[message] = x, mnf.send(x, comm, peer, tag)
        elif comm.rank == message.dest:
            time.sleep(message.delays[1])
            if message.way not in ('isend', 'send_obj'):
                receive = comm.recv if message.way == 'send' and rng[comm.rank].random() < .5 else (
                    lambda source, tag: mnf.recv(comm, source, tag=tag))
                received[message] = y = receive(peer, tag)
                np.testing.assert_array_equal(getattr(y, 'array', y), value)
    for message in reversed(messages):  # what was sent without waiting, last
        if comm.rank == message.dest and message.way == 'send_obj':
            assert comm.recv_obj(message.source, tag=8) in {
                each.number for each in messages if each.way == 'send_obj'}
    for message in messages:
        if comm.rank == message.dest and message.way == 'isend':
            assert comm.recv(message.source, 7)[0] == message.number
    comm.waitall(pending)
    for message in reversed(messages):
        if message in received and message.way in ('gradient', 'array'):
            time.sleep(message.delays[0])
            F.sum(received[message] * (message.number + 1)).backward()
        elif message in sent:
            time.sleep(message.delays[1])
            x, delegate = sent[message]
            delegate.backward()
            if message.way == 'gradient':
                np.testing.assert_array_equal(x.grad, [message.number + 1] * message.size)


@pytest.mark.sample(15)
@pytest.mark.parametrize('seed', range(30))
def test_correct_programs_never_raise(comm, at_once, seed):
    rng = random.Random(seed)
    own = [random.Random(f'{seed} {rank}') for rank in range(comm.size)]
    for _ in range(3):
        play(comm, [Message(rng, i, comm.size) for i in range(rng.randrange(12))], own)


SEND, RECV = True, False


@pytest.mark.parametrize('mine, theirs, in_flight, is_deadlock', [
    # In flight: to the other rank, to this one, and of the latter those of chainermn.functions.
    ((RECV, 0), (RECV, 0), (0, 0, 0), True),
    ((RECV, 0), (RECV, 1), (0, 0, 0), True),
    ((RECV, 0), (RECV, 0), (1, 0, 0), False),  # it has not seen that yet
    ((RECV, 0), (RECV, 0), (0, 1, 0), False),  # this rank has not
    ((SEND, 0), (SEND, 0), (1, 1, 1), True),
    ((SEND, 0), (SEND, 0), (2, 1, 1), False),
    ((SEND, 0), (SEND, 0), (1, 2, 2), False),
    ((SEND, 0), (SEND, 0), (1, 1, 0), False),  # an old notice, and an isend
    ((SEND, 0), (RECV, 0), (1, 0, 0), False),
    ((SEND, 0), (RECV, 1), (1, 0, 0), True),
    ((SEND, 0), (RECV, -1), (1, 0, 0), False),  # any tag
    ((RECV, 0), (SEND, 0), (0, 1, 1), False),
    ((RECV, 0), (SEND, 1), (0, 1, 1), True),
    ((RECV, 0), (SEND, 1), (0, 0, 0), False),  # an old notice
])
def test_what_is_a_deadlock(mine, theirs, in_flight, is_deadlock):
    calls = MessageRecord(MPI.COMM_SELF)
    deadlocks = pairwise.Deadlocks(MPI.COMM_SELF, 0, calls)
    calls.sent[0, 1], calls.received[0, 1], deadlocks.n_marked_received[0] = 10, 20, 15
    to_peer, to_me, marked = in_flight
    deadlocks._notices[0] = pairwise._Notice(
        pairwise.PeerWait(*theirs, ''), 20 + to_me, 15 + marked, 10 - to_peer)
    with pytest.raises(ValueError) if is_deadlock else contextlib.nullcontext():
        deadlocks._check(0, pairwise.PeerWait(*mine, ''))
