"""Correct programs: threads, also those of libraries, that send or wait."""

import concurrent.futures
import contextlib
import multiprocessing
import queue
import sched
import signal
import threading
import time

import chainer
import numpy as np
from correct_play import ARRAY, LARGE, Play, part


@part
def timer(play: Play) -> None:
    """Both main threads wait for each other's messages; a timer sends the first one."""
    source, dest = play.pair()
    seconds = play.seconds()
    if play.rank == source:
        sends = threading.Timer(seconds, play.third.send, [ARRAY, dest, 0])
        sends.start()
        play.comm.recv(dest, 0)
        sends.join()
    elif play.rank == dest:
        play.third.recv(source, 0)
        play.comm.send(ARRAY, source, 0)


@part
def pool(play: Play) -> None:
    """A worker of a pool sends while the main thread is in a collective operation."""
    source, dest = play.pair()
    seconds = play.seconds()

    def send() -> None:
        time.sleep(seconds)
        play.third.send(LARGE, dest, 0)

    if play.rank == source:
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            future = executor.submit(send)
            play.comm.barrier()
            future.result()
    else:
        if play.rank == dest:
            play.third.recv(source, 0)
        play.comm.barrier()


@part
def old_pool(play: Play) -> None:
    """The thread of a pool has communicated before, and gets its next task late."""
    source, dest = play.pair()
    seconds = play.seconds()
    if play.rank == source:
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            executor.submit(play.third.send, ARRAY, dest, 0).result()
            later = threading.Timer(seconds, executor.submit, [play.third.send, ARRAY, dest, 1])
            later.start()
            play.comm.recv(dest, 0)
            later.join()
    elif play.rank == dest:
        play.third.recv(source, 0)
        play.third.recv(source, 1)
        play.comm.send(ARRAY, source, 0)


@part
def listener(play: Play) -> None:
    """A thread of each rank waits for a command that comes after the main threads' work."""
    first, seconds = play.peer(), play.seconds()

    def listen() -> None:
        play.third.recv(first, 0)

    if play.rank == first:
        play.comm.barrier()
        time.sleep(seconds)
        play.comm.allreduce(ARRAY)
        for rank in range(play.size):
            if rank != first:
                play.third.send(ARRAY, rank, 0)
    else:
        thread = threading.Thread(target=listen)
        thread.start()
        play.comm.barrier()
        play.comm.allreduce(ARRAY)
        thread.join()


@part
def threads_in_opposite_orders(play: Play) -> None:
    """Two threads of each rank wait for the other one; one of the four is late."""
    first, second = play.pair()
    seconds = play.seconds()
    if play.rank == first:
        thread = threading.Thread(target=play.third.recv, args=[second, 0])
        thread.start()
        time.sleep(seconds)
        play.second.send(ARRAY, second, 0)
        thread.join()
    elif play.rank == second:
        def answer() -> None:
            play.second.recv(first, 0)
            play.third.send(ARRAY, first, 0)

        thread = threading.Thread(target=answer)
        thread.start()
        thread.join()


@part
def threads_in_messages_of_one_communicator(play: Play) -> None:
    """Two threads of a rank receive, one of them for long; the other rank waits for the result."""
    source, dest = play.pair()
    seconds = play.seconds()
    if play.rank == source:
        thread = threading.Thread(target=play.comm.recv, args=[dest, 1])
        thread.start()
        first = threading.Timer(seconds, play.second.send, [ARRAY, dest, 0])
        first.start()
        play.comm.recv(dest, 0)
        play.comm.send(ARRAY, dest, 2)
        thread.join()
        first.join()
    elif play.rank == dest:
        play.second.recv(source, 0)
        play.comm.send(ARRAY, source, 0)
        play.comm.recv(source, 2)
        play.comm.send(ARRAY, source, 1)


@part
def idle_daemon_threads(play: Play) -> None:
    """Prefetch threads that never communicate."""
    stops = threading.Event()
    for _ in range(2):
        threading.Thread(target=stops.wait, daemon=True).start()
    play.pause()
    play.comm.barrier()
    stops.set()


def _sleep_in_processes(seconds: float) -> None:
    with multiprocessing.get_context('fork').Pool(1) as pool:
        pool.map(time.sleep, [seconds])


def _sleep_in_a_process(seconds: float) -> None:
    with concurrent.futures.ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context('fork')) as pool:
        pool.submit(time.sleep, seconds).result()


def _sleep_in_a_pool(seconds: float) -> None:
    with multiprocessing.pool.ThreadPool(1) as pool:
        pool.map(time.sleep, [seconds])


def _load_in_threads(seconds: float) -> None:
    """All frames of the threads are those of libraries."""
    images = chainer.datasets.TransformDataset([seconds], time.sleep)
    next(chainer.iterators.MultithreadIterator(images, 1, n_threads=1))


def _load_in_processes(seconds: float) -> None:
    images = chainer.datasets.TransformDataset([seconds], time.sleep)
    iterator = chainer.iterators.MultiprocessIterator(images, 1, n_processes=1, n_prefetch=1)
    next(iterator)
    iterator.finalize()


def _handle_a_signal(seconds: float) -> None:
    """A scheduler such as Slurm signals, for example before the time limit."""
    event = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *args: event.set())
    signal.setitimer(signal.ITIMER_REAL, max(seconds, .01))
    event.wait()
    signal.signal(signal.SIGALRM, before)


@part
def listener_while_the_main_thread_waits(play: Play) -> None:
    """A thread listens for a command, while the main thread waits for processes, or for data."""
    source, dest = play.pair()
    seconds = play.seconds()
    wait = play.rng.choice([_sleep_in_processes, _sleep_in_a_process, _sleep_in_a_pool,
                            _load_in_threads, _load_in_processes, _handle_a_signal])
    if play.rank == source:
        listener = threading.Thread(target=play.third.recv, args=[dest, 0])
        listener.start()
        wait(seconds)
        play.comm.send(ARRAY, dest, 0)
        listener.join()
    elif play.rank == dest:
        play.comm.recv(source, 0)
        play.third.send(ARRAY, source, 0)


@part
def callback_of_a_pool(play: Play) -> None:
    """A thread of a pool runs a function of a library; its callback sends the result."""
    source, dest = play.pair()
    wait, seconds = np.vectorize(time.sleep, otypes=[object]), play.seconds()
    if play.rank == source:
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            future = executor.submit(wait, seconds)
            future.add_done_callback(lambda future: play.third.send(ARRAY, dest, 0))
            play.comm.recv(dest, 0)
    elif play.rank == dest:
        play.third.recv(source, 0)
        play.comm.send(ARRAY, source, 0)


@part
def data_of_a_library(play: Play) -> None:
    """A thread of a library puts data into a queue, from which a thread of the program sends."""
    source, dest = play.pair()
    data: queue.Queue[np.ndarray] = queue.Queue()
    scheduler = sched.scheduler()
    scheduler.enter(play.seconds(), 1, data.put, [ARRAY])
    # NumPy calls the scheduler, so that no frame is of the program.
    library = np.vectorize(scheduler.run, otypes=[object])
    if play.rank == source:
        threads = [threading.Thread(target=library, args=[True]),
                   threading.Thread(target=lambda: play.third.send(data.get(), dest, 0))]
        for thread in threads:
            thread.start()
        play.comm.recv(dest, 0)
        for thread in threads:
            thread.join()
    elif play.rank == dest:
        play.third.recv(source, 0)
        play.comm.send(ARRAY, source, 0)


@part
def own_timeout(play: Play) -> None:
    """The program limits the time of a wait; without that, two ranks would wait forever."""
    source, dest = play.pair()
    seconds = max(play.seconds(), .5)

    def give_up(*args: object) -> None:
        raise TimeoutError

    if play.rank == source:
        requests = [play.comm.irecv(dest, tag) for tag in range(2)]
        before = signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with contextlib.suppress(TimeoutError):  # .5 s are enough to get here
            requests[0].wait()  # polls, since there is another request
        play.comm.send(ARRAY, dest, 0)
        play.comm.waitall(requests)
        signal.signal(signal.SIGALRM, before)
    elif play.rank == dest:
        play.comm.recv(source, 0)
        play.comm.send(ARRAY, source, 0)
        play.comm.send(ARRAY, source, 1)
