"""One process has a lock, until it releases the lock or ends in any way."""
import errno
import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from chainermn.extensions._checkpointing import lock as locking

ALONE = pytest.mark.mpi_skip

ALONE_PROGRAM = pathlib.Path(__file__).parents[1] / 'lock_alone.py'


def start(path, code, **kwargs):
    return subprocess.Popen([sys.executable, '-I', '-S', ALONE_PROGRAM, locking.__file__, path,
                             f'import time\n{code}'], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, **kwargs)


def holder(path):
    """A process that has the lock, until its standard input ends."""
    process = start(path, 'lock["acquire"](path, 0); print("has it", flush=True); input()')
    assert process.stdout.readline() == 'has it\n'
    return process


def kill(process):
    process.kill()
    process.communicate()


def held():
    return locking.runtime.get(locking._Locks).held


@pytest.fixture
def path(tmp_path):
    before = set(held())  # of extensions that are not collected yet
    yield str(tmp_path / 'tmp-run.0.N.lock')
    assert set(held()) <= before


def test_several_users_in_a_process_share_the_lock(path, tmp_path):
    os.symlink(tmp_path, tmp_path / 'link')
    other_path = str(tmp_path / 'link' / 'tmp-run.0.N.lock')
    locks = [locking.acquire(path, 0), locking.acquire(other_path, 0)]
    for lock in locks:
        assert os.path.exists(path)
        lock.release()
    assert not os.path.exists(path)


def test_threads_of_a_process_share_the_lock(path):
    locks = []
    threads = [threading.Thread(target=lambda: locks.append(locking.acquire(path, 50)))
               for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(locks)) == 1 and locks[0].users == 8
    for lock in locks:
        lock.release()


@ALONE
def test_a_child_does_not_keep_the_lock(path):
    """Such as the worker of a data loader, when the process is killed."""
    process = start(path, '''
lock["acquire"](path, 0)
child = os.fork()
if not child:
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
time.sleep(1000)
''')
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    locking.acquire(path, 30).release()
    os.kill(child, signal.SIGKILL)  # it was there
    process.communicate()


@ALONE
def test_a_child_that_exits_does_not_release_the_lock(path):
    process = start(path, '''
mine = lock["acquire"](path, 0)
child = os.fork()
if not child:
    mine.release()
    sys.exit()
os.waitpid(child, 0)
print('has it', flush=True)
input()
''')
    assert process.stdout.readline() == 'has it\n'
    with pytest.raises(locking.InUseError, match=f'process {process.pid} on'):
        locking.acquire(path, 0)
    kill(process)


@ALONE
@pytest.mark.limit(300)
def test_one_process_at_a_time_has_the_lock(path, tmp_path):
    """Though the file is removed each time."""
    count = tmp_path / 'count'
    count.write_text('0')
    code = '''
for _ in range(30):
    mine = lock["acquire"](path, 250)
    number = int(open(path + '/../count').read()) + 1
    with open(path + '/../count', 'w') as file:
        file.write(str(number))
    mine.release()
'''.replace("path + '/../count'", repr(str(count)))
    processes = [start(path, 'lock["acquire"].__globals__["_POLL_INTERVAL"] = 0.001' + code,
                       stderr=subprocess.PIPE) for _ in range(4)]
    for process in processes:
        assert process.communicate()[1] == '' and process.returncode == 0
    assert count.read_text() == '120' and not os.path.exists(path)


@ALONE
@pytest.mark.parametrize('content', [b'', b'\xff', b'\x1b[31m', b'\0' * 1000])
def test_an_owner_that_left_no_name(path, content):
    process = holder(path)
    with open(path, 'wb') as file:
        file.write(content)
    with pytest.raises(locking.InUseError):
        locking.acquire(path, 0)
    kill(process)


def test_a_file_that_was_removed_by_hand(path):
    lock = locking.acquire(path, 0)
    os.remove(path)
    with open(path, 'w') as file:  # somebody else's now
        file.write('theirs')
    lock.release()
    assert pathlib.Path(path).read_text() == 'theirs'


def test_a_link_is_not_followed(path, tmp_path):
    (tmp_path / 'mine').write_text('mine')
    os.symlink('mine', path)
    with pytest.raises(OSError):
        locking.acquire(path, 0)
    assert (tmp_path / 'mine').read_text() == 'mine'


def test_a_file_system_that_cannot_lock(path, monkeypatch):
    """Simulated, as there is none here."""
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, 'flock', flock)
    before = os.listdir('/proc/self/fd')
    with pytest.raises(OSError, match='No locks available'):
        locking.acquire(path, 50)
    assert len(os.listdir('/proc/self/fd')) == len(before)
