"""Threads that send and receive on one communicator at the same time."""

import functools
import sys
import threading
import time

import chainer
import numpy as np
import pytest
from each_case import each_case

import chainermn
import chainermn.functions as F
from chainermn._collectives.point_to_point import INLINE

pytestmark = pytest.mark.mpi(min_size=2)

N_THREADS, N_MESSAGES = 2, 5
#: Elements of float64 in a message: small ones are sent with their header.
SIZES = 0, 1, INLINE // 8, INLINE // 8 + 1, 30000


@pytest.fixture
def pair():
    """A communicator, and the other rank of a pair; ranks without one get ``None``."""
    comm = chainermn.create_communicator('naive')
    other = comm.rank ^ 1
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield comm, other if other < comm.size else None
    sys.setswitchinterval(interval)
    comm.finalize()


def run(*functions):
    """Run functions in threads; raise the first error."""
    errors = []

    def call(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=[function]) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def message(n, thread):
    """Arrays of one value, which tells the message and the thread."""
    arrays = [np.full(SIZES[(n + i) % len(SIZES)], 100. * n + thread) for i in range(3)]
    return tuple(arrays) if n % 2 else arrays[0]


def values_in(received):
    """The values in a message."""
    arrays = received if isinstance(received, tuple) else (received,)
    return {float(value) for x in arrays for value in x}


@pytest.mark.slow
@each_case('kind', ['arrays', 'objects'])
def test_messages_with_one_tag(pair, kind):
    """Each message arrives whole and once, at any thread."""
    comm, other = pair
    received = []

    def send(thread):
        for n in range(N_MESSAGES):
            (comm.send_obj if kind == 'objects' else comm.send)(message(n, thread), other, 0)

    def receive():
        for _ in range(N_MESSAGES):
            received.append(
                comm.recv_obj(other, tag=0) if kind == 'objects' else comm.recv(other, 0))

    if other is None:
        return
    threads = range(N_THREADS)
    if comm.rank % 2 == 0:
        run(*[functools.partial(send, thread) for thread in threads])
        return
    run(*[receive for _ in threads])
    got = [values_in(each) for each in received]
    assert all(len(values) <= 1 for values in got)
    sent = [values_in(message(n, thread)) for n in range(N_MESSAGES) for thread in threads]
    assert sorted(map(sorted, got)) == sorted(map(sorted, sent))


def test_one_request_in_two_threads(pair):
    """A request is waited for once; the other thread gets an error."""
    comm, other = pair
    if other is None:
        return
    request = comm.irecv(other, 0)
    results = []

    def wait():
        try:
            results.append(request.wait())
        except RuntimeError as error:
            results.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(.05)
    comm.send(np.full(5, float(comm.rank)), other, 0)
    for thread in threads:
        thread.join()
    error, = [each for each in results if isinstance(each, RuntimeError)]
    received, = [each for each in results if each is not error]
    assert 'wait() was already called' in str(error)
    np.testing.assert_array_equal(received, np.full(5, float(other)))


@pytest.mark.parametrize('same_tag', [False, True])
def test_functions(pair, same_tag):
    """Each thread gets the gradient of its own message, though they arrive in any order."""
    comm, other = pair

    def train(thread):
        def run():
            for n in range(N_MESSAGES):
                x = chainer.Variable(np.full(5, 100. * n + thread))
                tag = 0 if same_tag else thread
                if comm.rank % 2 == 0:
                    F.send(2 * x, comm, other, tag).backward()
                    np.testing.assert_array_equal(x.grad, 2 * (x.array + 1))
                else:
                    y = F.recv(comm, other, tag=tag)
                    y.grad = y.array / 2 + 1
                    y.backward()
        return run

    if other is not None:
        run(*[train(thread) for thread in range(N_THREADS)])


def test_gradients_in_another_order_than_the_threads_wait(pair):
    comm, other = pair
    if other is None:
        return
    if comm.rank % 2 == 0:
        xs = [chainer.Variable(np.zeros(3)) for _ in range(3)]
        sent = [F.send(x, comm, other) for x in xs]
        run(*[each.backward for each in sent])
        for n, x in enumerate(xs):
            np.testing.assert_array_equal(x.grad, np.full(3, n))
    else:
        received = [F.recv(comm, other) for _ in range(3)]
        for n in 2, 0, 1:
            time.sleep(.02)  # so that several threads wait
            received[n].grad = np.full(3, float(n))
            received[n].backward()

