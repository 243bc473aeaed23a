"""A job runs in a thread, and its error is not lost."""
import os
import subprocess
import sys
import threading
import time

import pytest
from time_limits import seconds

from chainermn._process import runtime
from chainermn.extensions._checkpointing import background
from chainermn.extensions._checkpointing.background import BackgroundWriter


def is_pending(writer):
    return writer in runtime.get(background._Writers).pending


def fail():
    os.stat('/proc/none')


def test_jobs_run_in_the_order_in_which_they_were_started(monkeypatch):
    """They may write the same file: the last one must remain."""
    class Thread(threading.Thread):
        def run(self):
            if self.name == 'writes file 0':
                time.sleep(.2)
            super().run()

    monkeypatch.setattr(threading, 'Thread', Thread)
    done, writers = [], [BackgroundWriter() for _ in range(3)]
    for n, writer in enumerate(writers):
        writer.start(f'file {n}', lambda n=n: done.append(n))
    assert [writer.join() for writer in writers] == [None] * 3
    assert done == [0, 1, 2]


def test_waiting_for_all_leaves_the_error_to_its_owner():
    writer = BackgroundWriter()
    writer.start('here/file', fail)
    background.wait_for_all()
    assert is_pending(writer)
    assert writer.join().startswith('here/file')


def test_no_thread_can_be_started(monkeypatch):
    """As in Python 3.12 and later when the interpreter is exiting; the job runs at once then."""
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, 'start', refuse)
    done = []
    writer = BackgroundWriter()
    writer.start('here/file', lambda: done.append(1))
    assert done and is_pending(writer) and writer.join() is None


SCRIPT = '''
import os, sys, time
from chainermn.extensions._checkpointing import background, rank_file
if sys.argv[2] == 'ranks':
    from mpi4py import MPI
path = sys.argv[1]
writer = background.BackgroundWriter()

class Slow:
    def __reduce__(self):
        time.sleep(0.3)
        return str, ()

import numpy
arrays = {'slow': numpy.array(Slow(), dtype=object), 'x': numpy.arange(100000)}
tag = rank_file.Tag('a-1', 1, 1, [0], 0)
writer.start(path, lambda: rank_file.write(path, arrays, tag))
if sys.argv[2] == 'fork' and os.fork() == 0:
    assert not background.runtime.get(background._Writers).pending
    sys.exit()
if sys.argv[2] == 'raise':
    raise ValueError('on purpose')
if sys.argv[2] == 'fork':
    os.wait()
'''


def run_script(*command, python=('-W', 'ignore')):
    return subprocess.run([*command[:-2], sys.executable, *python, '-c', SCRIPT, *command[-2:]],
                          capture_output=True, text=True, timeout=seconds(50))


@pytest.mark.mpi_skip
class TestTheEndOfTheProgram:
    @pytest.mark.slow
    @pytest.mark.parametrize('how', ['end', 'raise', 'fork'])
    def test_the_file_is_completed(self, tmp_path, how):
        from chainermn.extensions._checkpointing.npz import find_problem

        done = run_script(str(tmp_path / 'file'), how)
        assert done.returncode == (how == 'raise'), done.stderr
        assert ('on purpose' in done.stderr) == (how == 'raise')
        assert os.listdir(tmp_path) == ['file'] and find_problem(str(tmp_path / 'file')) is None

    def test_an_error_that_nobody_asked_for_ends_the_job(self, tmp_path):
        done = run_script('mpiexec', '-n', '2', str(tmp_path / 'none' / 'file'), 'ranks')
        assert done.returncode != 0
        assert 'aborts the job: uncaught OSError' in done.stderr
        assert f'OSError: writing failed\n  {tmp_path}/none/file: FileNotFoundError' in done.stderr
