"""A job runs beside the caller, is waited for, and its error reaches someone."""
import os
import subprocess
import sys
import threading
import time

import pytest
from mpi4py import MPI
from time_limits import seconds

import chainermn
from chainermn.extensions import _background


def fail():
    os.stat('/proc/none')


@pytest.fixture(scope='module')
def comm():
    return chainermn.create_communicator('naive')


def test_the_caller_goes_on_and_join_waits():
    background = _background.Background()
    go_on, done = threading.Event(), []

    def job():
        go_on.wait()
        done.append(threading.current_thread().name)

    background.start('here/file', job)
    assert background.is_busy and not done
    go_on.set()
    assert background.join() is None
    assert done == ['writes here/file'] and not background.is_busy
    assert background.join() is None


def test_join_says_what_went_wrong_once():
    background = _background.Background()
    background.start('here/file', fail)
    assert background.join() == ("here/file: FileNotFoundError: [Errno 2] No such file or "
                                 "directory: '/proc/none'")
    assert background.join() is None


def test_jobs_run_in_the_order_in_which_they_were_started(monkeypatch):
    """They may write the same file: the one that was started last has to be there at the end."""
    class Thread(threading.Thread):
        def run(self):
            if self.name == 'writes file 0':
                time.sleep(.2)
            super().run()

    monkeypatch.setattr(threading, 'Thread', Thread)
    done, backgrounds = [], [_background.Background() for _ in range(3)]
    for n, background in enumerate(backgrounds):
        background.start(f'file {n}', lambda n=n: done.append(n))
    assert [background.join() for background in backgrounds] == [None] * 3
    assert done == [0, 1, 2]


def test_waiting_for_all_leaves_the_error_to_its_owner():
    background = _background.Background()
    background.start('here/file', fail)
    _background.wait_for_all()
    assert background.is_busy
    assert background.join().startswith('here/file')


def test_a_refusal_is_raised_by_the_next_verb_of_the_others(comm):
    with pytest.raises(OSError, match='file 0: full') as caught:
        if comm.rank == 0:
            _background.refuse('it', comm, 'file 0: full')
        comm.allreduce_obj(1)
    assert len(set(comm.allgather_obj(str(caught.value)))) == 1


def test_no_thread_can_be_started(monkeypatch):
    """As in Python 3.12 and later when the interpreter is ending; it is done at once then."""
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, 'start', refuse)
    done = []
    background = _background.Background()
    background.start('here/file', lambda: done.append(1))
    assert done and background.is_busy and background.join() is None


SCRIPT = '''
import os, sys, time
from chainermn.extensions import _background, _snapshot_files
if sys.argv[2] == 'ranks':
    from mpi4py import MPI
path = sys.argv[1]
background = _background.Background()

class Slow:
    def __reduce__(self):
        time.sleep(0.3)
        return str, ()

import numpy
arrays = {'slow': numpy.array(Slow(), dtype=object), 'x': numpy.arange(100000)}
background.start(path, lambda: _snapshot_files.write(path, arrays))
if sys.argv[2] == 'fork' and os.fork() == 0:
    assert not _background._pending
    sys.exit()
if sys.argv[2] == 'raise':
    raise ValueError('on purpose')
if sys.argv[2] == 'fork':
    os.wait()
'''


def run_script(*command, python=('-W', 'ignore')):
    return subprocess.run([*command[:-2], sys.executable, *python, '-c', SCRIPT, *command[-2:]],
                          capture_output=True, text=True, timeout=seconds(50))


@pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason='starts processes itself')
class TestTheEndOfTheProgram:
    @pytest.mark.parametrize('how', ['end', 'raise', 'fork'])
    def test_the_file_is_completed(self, tmp_path, how):
        from chainermn.extensions._arrays import problem_of

        done = run_script(str(tmp_path / 'file'), how)
        assert done.returncode == (how == 'raise'), done.stderr
        assert ('on purpose' in done.stderr) == (how == 'raise')
        assert os.listdir(tmp_path) == ['file'] and problem_of(str(tmp_path / 'file')) is None

    def test_an_error_that_nobody_asked_for_is_printed(self, tmp_path):
        done = run_script(str(tmp_path / 'none' / 'file'), 'end')
        assert f'OSError: not written:\n  {tmp_path}/none/file: FileNotFoundError' in done.stderr

    def test_and_ends_the_job_with_an_error(self, tmp_path):
        done = run_script('mpiexec', '-n', '2', str(tmp_path / 'none' / 'file'), 'ranks')
        assert done.returncode != 0
        assert 'ends the job: uncaught OSError' in done.stderr and 'not written' in done.stderr
