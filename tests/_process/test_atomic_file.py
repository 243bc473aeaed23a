"""A file is complete or absent, and private until it is complete."""
import contextlib
import os
import resource
import subprocess
import sys
import time

import pytest
from time_limits import seconds

from chainermn._process import atomic_file

ALONE = pytest.mark.mpi_skip


def write(path, content=b'new'):
    with atomic_file.open_atomic(str(path)) as file:
        file.write(content)


def test_a_file_takes_the_place_of_another(tmp_path):
    for content in (b'old', b'new'):
        write(tmp_path / 'file', content)
    assert (tmp_path / 'file').read_bytes() == b'new' and os.listdir(tmp_path) == ['file']


def test_an_error_leaves_the_old_file_and_no_litter(tmp_path):
    write(tmp_path / 'file', b'old')
    with pytest.raises(ZeroDivisionError), atomic_file.open_atomic(str(tmp_path / 'file')) as file:
        file.write(b'new')
        raise ZeroDivisionError
    assert (tmp_path / 'file').read_bytes() == b'old' and os.listdir(tmp_path) == ['file']


@ALONE
@pytest.mark.parametrize('umask, mode', [(0o022, 0o644), (0o077, 0o600), (0o007, 0o660)])
def test_others_can_read_only_the_complete_file_if_the_umask_allows_it(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with atomic_file.open_atomic(str(tmp_path / 'file')):
            assert os.stat(tmp_path / 'tmp-file.part').st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    assert os.stat(tmp_path / 'file').st_mode & 0o777 == mode


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path):
    (tmp_path / 'mine').write_bytes(b'mine')
    os.symlink('mine', tmp_path / 'tmp-file.part')
    write(tmp_path / 'file')
    assert (tmp_path / 'mine').read_bytes() == b'mine'
    assert (tmp_path / 'file').read_bytes() == b'new' and not os.path.islink(tmp_path / 'file')


@ALONE
@pytest.mark.parametrize('sync', [True, False])
def test_a_file_goes_to_the_disk_only_on_request(tmp_path, monkeypatch, sync):
    synced = []
    monkeypatch.setattr(os, 'fsync', synced.append)
    with atomic_file.open_atomic(str(tmp_path / 'file'), sync=sync) as file:
        file.write(b'new')
    assert len(synced) == (2 if sync else 0)
    assert (tmp_path / 'file').read_bytes() == b'new'


def test_removing_what_is_not_there(tmp_path):
    write(tmp_path / 'file')
    for _ in range(2):
        atomic_file.remove(str(tmp_path / 'file'))
    assert os.listdir(tmp_path) == []


def fails(path, match):
    with pytest.raises(OSError, match=match):
        write(path, bytes(2_000_000))
    assert not [name for name in os.listdir(path.parent) if name.endswith('.part')]


@ALONE
def test_a_full_disk(tmp_path):
    """A real one, of 1 MB; when there is room again, the file is written."""
    disk = tmp_path / 'disk'
    disk.mkdir()
    done = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', str(disk)],
                          capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f'needs to mount: {done.stderr.strip()}')
    try:
        write(disk / 'file', b'old')
        fails(disk / 'file', 'No space left')
        assert (disk / 'file').read_bytes() == b'old'
        write(disk / 'file')
        assert (disk / 'file').read_bytes() == b'new'
    finally:
        while subprocess.run(['umount', str(disk)], capture_output=True).returncode:
            time.sleep(0.1)


@contextlib.contextmanager
def limit(size):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_may_not_be_so_large(tmp_path):
    with limit(1_000_000):
        fails(tmp_path / 'file', 'File too large')
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / 'folder').write_bytes(b'')
    with pytest.raises(NotADirectoryError):
        write(tmp_path / 'folder' / 'file')


@ALONE
@pytest.mark.skipif(os.geteuid() != 0, reason='needs root, to become somebody else')
def test_a_folder_that_is_not_for_writing(tmp_path):
    write(tmp_path / 'file', b'old')
    os.chmod(tmp_path, 0o555)
    script = ('import os, sys\n'
              'from chainermn._process import atomic_file\n'
              'os.setuid(65534)\n'
              'try:\n'
              '    with atomic_file.open_atomic(sys.argv[1]) as file:\n'
              '        file.write(b"new")\n'
              'except PermissionError as error:\n'
              '    print(error)\n')
    for folder in (tmp_path, *tmp_path.parents):
        if not os.stat(folder).st_mode & 0o001:
            os.chmod(folder, os.stat(folder).st_mode | 0o011)
    done = subprocess.run([sys.executable, '-c', script, str(tmp_path / 'file')],
                          capture_output=True, text=True, timeout=seconds(50))
    assert 'Permission denied' in done.stdout, done.stderr
    assert (tmp_path / 'file').read_bytes() == b'old' and os.listdir(tmp_path) == ['file']
