"""Threads that may still use a communicator, and threads that cannot."""

import asyncio
import bdb
import concurrent.futures
import contextlib
import multiprocessing.pool
import queue
import signal
import threading
import time

import pytest

from chainermn._diagnostics import program_threads

MAIN = threading.main_thread().ident


def seen(also_blocked=(), main=True):
    """Return what the watchdog sees while the main thread is inside or outside an operation."""
    found = []
    # Its frames are not of the program, as it is the watchdog.
    thread = threading.Thread(target=lambda: found.append(
        program_threads.are_running([*[MAIN] * main, *also_blocked])))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def alone():
    """The test runner has no threads of its own, and its time limit is suspended."""
    limit, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    if seen():
        signal.setitimer(signal.ITIMER_REAL, limit)
        pytest.skip('the test runner uses threads')
    yield
    signal.setitimer(signal.ITIMER_REAL, limit)


@contextlib.contextmanager
def running(target, *args, **kwargs):
    """A daemon thread, once it has begun to wait."""
    thread = threading.Thread(target=target, args=args, kwargs=kwargs, daemon=True)
    thread.start()
    time.sleep(.1)
    yield thread


def test_a_thread_of_the_program_may_do_something(alone):
    end = threading.Event()

    def work():
        while not end.wait(.01):
            pass

    assert not seen()
    with running(work) as thread:
        assert seen()
        assert not seen([thread.ident])  # it is in an operation
        end.set()
        thread.join()
    assert not seen()


def test_a_thread_that_waits_for_work_cannot(alone):
    jobs = queue.Queue()

    def work():
        jobs.get()

    with running(work) as thread:
        assert not seen()
        jobs.put(None)
        thread.join()


def test_the_main_thread_may_even_if_it_waits():
    """A signal handler may end its wait, for example."""
    assert seen(main=False)


def test_a_thread_that_waits_with_a_timeout_may():
    jobs = queue.Queue()
    with running(lambda: jobs.get(timeout=60)) as thread:
        assert seen()
        jobs.put(None)
        thread.join()


def test_idle_pools_cannot(alone):
    with concurrent.futures.ThreadPoolExecutor(2) as pool, multiprocessing.pool.ThreadPool(2):
        pool.submit(int).result()
        assert not seen()
        start, end = threading.Event(), threading.Event()

        def job():
            start.set()
            while not end.is_set():
                pass

        for work in (job, lambda: (start.set(), time.sleep(.5))):
            end.clear()
            working = pool.submit(work)
            start.wait()
            assert seen()
            end.set()
            working.result()
            start.clear()


def test_a_program_with_an_alarm_may(alone):
    assert not seen()
    signal.setitimer(signal.ITIMER_REAL, 60)
    assert seen()


def test_a_server_or_event_loop_may():
    loop = asyncio.new_event_loop()
    with running(loop.run_forever) as thread:
        assert seen()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
    loop.close()


def test_threads_of_libraries_cannot(alone, tmp_path, monkeypatch):
    """For example, the thread of a progress bar."""
    (tmp_path / 'progress_bar.py').write_text('def monitor(end):\n    end.wait(60)\n')
    monkeypatch.syspath_prepend(tmp_path)
    from progress_bar import monitor

    end = threading.Event()
    with running(monitor, end) as thread:
        assert seen()
        stdlib, libraries = program_threads._folders()
        monkeypatch.setattr(program_threads, '_folders',
                            lambda: (stdlib, (*libraries, str(tmp_path))))
        assert not seen()
        end.set()
        thread.join()


def test_a_program_in_a_debugger_may():
    found = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame):
            found.append(seen())
            self.set_quit()

    with contextlib.suppress(bdb.BdbQuit):
        Debugger().run('x = 1\ny = 2')
    assert found == [True]

