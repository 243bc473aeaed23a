"""Correct programs: messages, and raw calls of mpi4py."""

import threading
import time

import numpy as np
from correct_play import ARRAY, LARGE, Play, part
from mpi4py.MPI import ANY_SOURCE, ANY_TAG


@part
def late_send(play: Play) -> None:
    """The receiver waits."""
    source, dest = play.pair()
    x, tag = play.rng.choice([ARRAY, LARGE, (ARRAY, LARGE)]), play.rng.choice([0, 7])
    received_tag, seconds = play.rng.choice([tag, ANY_TAG]), play.seconds()
    if play.rank == source:
        time.sleep(seconds)
        play.comm.send(x, dest, tag)
    elif play.rank == dest:
        play.comm.recv(source, received_tag)


@part
def late_recv(play: Play) -> None:
    """The sender waits, or has an object or a request in flight."""
    source, dest = play.pair()
    way, seconds = play.rng.choice(['send', 'send_obj', 'isend']), play.seconds()
    if play.rank == source:
        getattr(play.comm, way)(LARGE, dest, 0)
        play.comm.recv(dest, 1)
    elif play.rank == dest:
        time.sleep(seconds)
        play.comm.recv_obj(source, tag=0) if way == 'send_obj' else play.comm.recv(source, 0)
        play.comm.send(ARRAY, source, 1)


class Slow:
    """An object that takes long to pickle, or to unpickle."""

    def __init__(self, pickling: float = 0, unpickling: float = 0) -> None:
        self.pickling, self.unpickling = pickling, unpickling

    def __reduce__(self) -> tuple[object, ...]:
        time.sleep(self.pickling)
        return _unpickle, (self.unpickling,)


def _unpickle(seconds: float) -> Slow:
    time.sleep(seconds)
    return Slow()


@part
def objects_in_flight(play: Play) -> None:
    """MPI buffers small objects: the sender continues while the receiver waits for a later step."""
    source, dest = play.pair()
    comm, seconds = play.rng.choice([play.comm, play.second]), play.seconds()
    if play.rank == source:
        play.comm.send_obj('small', dest)
        play.comm.send_obj(Slow(seconds), dest)
        comm.send(ARRAY, dest, 1)
    elif play.rank == dest:
        comm.recv(source, 1)
        play.comm.recv_obj(source, tag=0)
        play.comm.recv_obj(source, tag=0)


@part
def ring(play: Play) -> None:
    """One rank breaks the circle."""
    right, left = (play.rank + 1) % play.size, (play.rank - 1) % play.size
    first = play.peer()
    play.pause()
    if play.rank == first:
        play.comm.send(LARGE, right, 0)
        play.comm.recv(left, 0)
    else:
        play.comm.recv(left, 0)
        play.comm.send(LARGE, right, 0)


@part
def ping_pong(play: Play) -> None:
    """At each moment one of two ranks waits for the other; alternately on two communicators."""
    first, second = play.pair()
    until = time.monotonic() + play.rng.uniform(.2, 2)
    size = play.rng.choice([1, 3000])
    if play.rank == first:
        going = True
        while going:
            going = time.monotonic() < until
            play.comm.send(np.full(size, going), second, 0)
            play.second.recv(second, 0)
    elif play.rank == second:
        going = True
        while going:
            going = play.comm.recv(first, 0)[0]
            play.second.send(ARRAY, first, 0)


@part
def requests(play: Play) -> None:
    """Neighbors exchange; the order of waits is random."""
    right, left = (play.rank + 1) % play.size, (play.rank - 1) % play.size
    play.pause()
    pending = [play.comm.irecv(left, 0), play.comm.irecv(left, 1)]
    play.pause()
    pending += [play.comm.isend(LARGE, right, 1), play.comm.isend(ARRAY, right, 0)]
    play.pause()
    if play.rng.random() < .5:
        play.rng.shuffle(pending)
        for request in pending:
            request.wait()
    else:
        play.comm.waitall(pending)


@part
def tested_requests(play: Play) -> None:
    """A rank computes until a message has arrived."""
    source, dest = play.pair()
    seconds = play.seconds()
    if play.rank == source:
        time.sleep(seconds)
        play.comm.isend(LARGE, dest).wait()
    elif play.rank == dest:
        request = play.comm.irecv(source)
        while not request.test():
            time.sleep(.01)


@part
def send_while_a_request_is_pending(play: Play) -> None:
    """Both wait, but the requests receive what the other sends."""
    first, second = play.pair()
    play.pause()
    if play.rank in (first, second):
        other = first + second - play.rank
        request = play.comm.irecv(other)
        play.comm.send(LARGE, other, 0)
        request.wait()


@part
def workers(play: Play) -> None:
    """A rank distributes tasks to whoever is free."""
    main, tasks = play.peer(), [play.seconds() / 2 for _ in range(2 * play.size)]
    if play.rank == main:
        working = play.size - 1
        while working:
            worker = play.comm.recv_obj(ANY_SOURCE)
            task = tasks.pop() if tasks else None
            working -= task is None
            play.comm.send_obj(task, worker)
    else:
        play.comm.send_obj(play.rank, main)
        while (task := play.comm.recv_obj(main)) is not None:
            time.sleep(task)
            play.comm.send_obj(play.rank, main)
    play.comm.barrier()  # the messages of the next part must not be received here


@part
def raw_barrier(play: Play) -> None:
    """A rank is late in mpi4py; another one waits in a message for it."""
    source, dest = play.pair()
    play.pause()
    if play.rank == dest:
        play.comm.mpi_comm.Barrier()
        play.comm.recv(source, 0)
        return
    play.comm.mpi_comm.Barrier()
    if play.rank == source:
        play.comm.send(ARRAY, dest, 0)


@part
def raw_message_first(play: Play) -> None:
    """Main threads wait for each other, one of them in mpi4py, where a thread helps."""
    first, second = play.pair()
    seconds = play.seconds()
    if play.rank == first:
        later = threading.Timer(seconds, play.comm.mpi_comm.send, [1, second, 77])
        later.start()
        play.comm.recv(second, 0)
        later.join()
    elif play.rank == second:
        play.comm.mpi_comm.recv(source=first, tag=77)
        play.comm.send(ARRAY, first, 0)

