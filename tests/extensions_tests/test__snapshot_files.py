"""Files are whole or absent, damage is found, and the ranks choose together."""
import io
import os
import pickle
import signal
import subprocess
import sys
import warnings
import zipfile

import chainer
import numpy as np
import pytest

from chainermn.communicators import create_communicator
from chainermn.extensions import _snapshot_files

ARRAYS = {'x': np.arange(1000.0), 'y/z': np.asarray(None)}


@pytest.fixture(scope='module')
def comm():
    return create_communicator('naive')


def test_what_was_written_is_read(tmp_path):
    path = str(tmp_path / 'file.0.1')
    _snapshot_files.write(path, ARRAYS)
    _snapshot_files.write(path, ARRAYS)  # over an older one
    assert os.listdir(tmp_path) == ['file.0.1']
    assert _snapshot_files.problem_of(path) is None
    with np.load(path, allow_pickle=True) as read:
        np.testing.assert_array_equal(read['x'], ARRAYS['x'])
        assert read['y/z'].item() is None


def test_an_error_leaves_what_was_there(tmp_path):
    path = str(tmp_path / 'file')
    _snapshot_files.write(path, ARRAYS)

    class Fails:
        def __array__(self, *args, **kwargs):
            raise OSError('no')

    with pytest.raises(OSError, match='no'):
        _snapshot_files.write(path, {'x': ARRAYS['x'], 'bad': Fails()})
    assert os.listdir(tmp_path) == ['file']
    assert _snapshot_files.problem_of(path) is None


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OSError):
        _snapshot_files.write(str(tmp_path / 'none' / 'file'), ARRAYS)


def test_a_process_killed_while_writing_leaves_no_file(tmp_path):
    script = (
        'import os, signal, sys, numpy\n'
        'from chainermn.extensions import _snapshot_files\n'
        'os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)\n'
        '_snapshot_files.write(sys.argv[1], {"x": numpy.ones(10)})\n')
    process = subprocess.run([sys.executable, '-c', script, str(tmp_path / 'file')], timeout=50)
    assert process.returncode == -signal.SIGKILL
    assert 'file' not in os.listdir(tmp_path)


def test_what_a_killed_process_left_is_taken_over(tmp_path):
    """Also by a process of the same number, as in a container that is started again."""
    (tmp_path / 'tmp-file.part').write_bytes(b'torn' * 10000)
    _snapshot_files.write(str(tmp_path / 'file'), ARRAYS)
    assert os.listdir(tmp_path) == ['file']
    assert _snapshot_files.problem_of(str(tmp_path / 'file')) is None


@pytest.mark.parametrize('compress', [False, True])
def test_chainer_reads_it(tmp_path, compress):
    model, loaded = chainer.links.BatchNormalization(2), chainer.links.BatchNormalization(2)
    model.gamma.array[...] = model.avg_mean[...] = 7
    path = str(tmp_path / 'file')
    _snapshot_files.write(path, _snapshot_files.copy_state(model), compress)
    chainer.serializers.load_npz(path, loaded)
    assert (loaded.gamma.array == 7).all() and (loaded.avg_mean == 7).all()
    with zipfile.ZipFile(path) as archive:
        assert {info.compress_type for info in archive.infolist()} == {8 if compress else 0}


@pytest.mark.parametrize('array', [
    np.arange(6, dtype='>i2').reshape(2, 3), np.asfortranarray(np.ones((3, 2))), np.float16(3),
    np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1), np.arange(10)[::2], np.empty((0, 3)),
    np.array(['a', 'bc']), np.array(['2020-01-01'], 'M8[D]'), np.array([(1, 2.0)], 'i4,f8'),
    np.array([[1], None], dtype=object), np.arange(300_000.0), np.array([True, False])],
    ids=lambda array: f'{array.dtype}{array.shape}')
def test_files_are_those_of_numpy(array):
    ours, theirs = io.BytesIO(), io.BytesIO()
    _snapshot_files._write_array(ours, np.asanyarray(array))
    np.lib.format.write_array(theirs, np.asanyarray(array))
    assert ours.getvalue() == theirs.getvalue()


class State:
    """Serializes an array of every kind, and a state below it."""

    def __init__(self):
        self.arrays = {'c': np.arange(6.0).reshape(2, 3), 'f': np.asfortranarray(np.eye(3)),
                       'scalar': 3, 'none': None, 'objects': np.array([[1], 'x'], dtype=object),
                       'empty': np.empty((0, 2), np.float16)}
        self.link = chainer.links.Linear(2, 2)

    def serialize(self, serializer):
        for name, array in self.arrays.items():
            serializer(name, array)
        self.link.serialize(serializer['below']['/link/'])


def test_a_copy_is_what_chainer_serializes_and_shares_nothing():
    state = State()
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(state)
    expected = {name: pickle.dumps(array) for name, array in serializer.target.items()}
    copied = _snapshot_files.copy_state(state)
    state.arrays['objects'][0].append('more')
    for array in serializer.target.values():
        array[...] = 0
    assert {name: pickle.dumps(array) for name, array in copied.items()} == expected


@pytest.mark.parametrize('damage', ['truncate', 'empty', 'flip', 'text', 'delete'])
def test_damage_is_found(tmp_path, damage):
    path = str(tmp_path / 'file')
    _snapshot_files.write(path, ARRAYS)
    with open(path, 'r+b') as file:
        size = os.path.getsize(path)
        if damage == 'truncate':
            file.truncate(size - 100)
        elif damage == 'empty':
            file.truncate(0)
        elif damage == 'flip':
            file.seek(size // 2)
            byte = file.read(1)
            file.seek(size // 2)
            file.write(bytes([byte[0] ^ 1]))
        elif damage == 'text':
            file.write(b'this is not a snapshot' * 100)
    if damage == 'delete':
        os.remove(path)
    assert _snapshot_files.problem_of(path)


def files_of(folder, rank, iterations):
    files = {i: str(folder / f'{rank}.{i}') for i in iterations}
    for path in files.values():
        _snapshot_files.write(path, ARRAYS)
    return files


def test_the_newest_that_all_have(comm, tmp_path):
    files = files_of(tmp_path, comm.rank, [1, 2, 3] + ([10] if comm.rank == 0 else [11]))
    expected = 10 if comm.size == 1 else 3
    assert _snapshot_files.newest_common(comm, files) == expected


def test_ranks_without_files_have_no_say(comm, tmp_path):
    files = files_of(tmp_path, comm.rank, [1, 2]) if comm.rank == 0 else None
    assert _snapshot_files.newest_common(comm, files) == 2


def test_nothing_in_common(comm, tmp_path):
    files = files_of(tmp_path, comm.rank, [] if comm.rank == 0 else [1])
    assert _snapshot_files.newest_common(comm, files) is None


def test_a_file_damaged_on_one_rank_is_passed_over_by_all(comm, tmp_path):
    files = files_of(tmp_path, comm.rank, [1, 2])
    if comm.rank == comm.size - 1:
        with open(files[2], 'r+b') as file:
            file.truncate(100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert _snapshot_files.newest_common(comm, files) == 1
    messages = [str(warning.message) for warning in caught]
    if comm.rank == 0:
        assert len(messages) == 1 and 'iteration 2' in messages[0]
        assert f'{comm.size - 1}.2' in messages[0]
    else:
        assert not messages
