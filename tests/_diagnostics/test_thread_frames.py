"""Frames of all threads are read while no garbage is collected, and only when they are needed."""

import concurrent.futures
import gc
import sys
import threading
import time

import numpy as np
import pytest

from chainermn._diagnostics import thread_frames
from chainermn._diagnostics.rank_progress import RankProgress


@pytest.fixture
def collections():
    """A list that grows with each garbage collection; each allocation begins one."""
    found, threshold = [], gc.get_threshold()

    def observe(phase, info):
        found.append(phase)

    gc.callbacks.append(observe)
    gc.set_threshold(1)
    yield found
    gc.set_threshold(*threshold)
    gc.callbacks.remove(observe)


def walk(frames):
    for frame in frames.values():
        while frame is not None:
            frame = frame.f_back


def test_no_garbage_is_collected_while_frames_are_read_on_python_3_11(collections):
    """Reading them while a finalizer sleeps can deadlock CPython 3.11.7."""
    event = threading.Event()
    threads = [threading.Thread(target=event.wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    with thread_frames.current() as frames:
        is_3_11 = sys.version_info[:2] == (3, 11)
        before = len(collections)
        walk(frames)
        garbage = [set() for _ in range(50)]  # enough for a collection
        assert (len(collections) == before) is is_3_11
        assert gc.isenabled() is not is_3_11
    event.set()
    for thread in threads:
        thread.join()
    before = len(collections)
    garbage += [set() for _ in range(50)]
    assert len(collections) > before
    assert {threading.main_thread().ident, *(each.ident for each in threads)} <= frames.keys()


@pytest.mark.parametrize('error', [None, ValueError])
def test_garbage_collection_that_the_program_disabled_stays_disabled(error):
    gc.disable()
    try:
        with thread_frames.current():
            if error is not None:
                raise error
    except ValueError:
        pass
    finally:
        is_enabled = gc.isenabled()
        gc.enable()
    assert not is_enabled


def test_garbage_is_collected_again_after_an_error():
    with pytest.raises(ValueError, match='test'), thread_frames.current():
        raise ValueError('test')
    assert gc.isenabled()


def test_a_rank_that_does_not_wait_is_observed_without_its_frames(naive, monkeypatch):
    """So a program that disables garbage collection for a while is not disturbed."""
    reading, current = [], thread_frames.current
    monkeypatch.setattr(thread_frames, 'current', lambda: (
        reading.append(threading.get_ident()) or current()))
    observer = []

    def observe():
        observer.append(threading.get_ident())
        progress = RankProgress()
        for _ in range(3):
            progress.observe(time.monotonic(), 1)
        assert observer[0] not in reading
        assert progress.main_thread(time.monotonic())[0]

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        running = executor.submit(observe)
        while not running.done():
            naive.allreduce(np.ones(3, 'f'))
    running.result()
    assert observer[0] in reading
