"""Files are whole or absent, hold what Chainer serializes, and say what they belong to."""
import hashlib
import io
import os
import pickle
import signal
import subprocess
import sys
import zipfile

import chainer
import numpy as np
import pytest
from time_limits import seconds

from chainermn.extensions import _snapshot_files
from chainermn.extensions._arrays import problem_of, tag_of

pytestmark = pytest.mark.mpi_skip

ARRAYS = {'x': np.arange(1000.0), 'y/z': np.asarray(None)}


def test_what_was_written_is_read(tmp_path):
    path = str(tmp_path / 'file.0.1')
    _snapshot_files.write(path, ARRAYS)
    _snapshot_files.write(path, ARRAYS)  # over an older one
    assert os.listdir(tmp_path) == ['file.0.1']
    assert problem_of(path) is None
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
    assert problem_of(path) is None


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OSError):
        _snapshot_files.write(str(tmp_path / 'none' / 'file'), ARRAYS)


def test_a_process_killed_while_writing_leaves_no_file(tmp_path):
    script = (
        'import os, signal, sys, numpy\n'
        'from chainermn.extensions import _snapshot_files\n'
        'os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)\n'
        '_snapshot_files.write(sys.argv[1], {"x": numpy.ones(10)})\n')
    process = subprocess.run([sys.executable, '-c', script, str(tmp_path / 'file')],
                             timeout=seconds(50))
    assert process.returncode == -signal.SIGKILL
    assert 'file' not in os.listdir(tmp_path)


def test_what_a_killed_process_left_is_taken_over(tmp_path):
    """Also by a process of the same number, as in a container that is started again."""
    (tmp_path / 'tmp-file.part').write_bytes(b'torn' * 10000)
    _snapshot_files.write(str(tmp_path / 'file'), ARRAYS)
    assert os.listdir(tmp_path) == ['file']
    assert problem_of(str(tmp_path / 'file')) is None


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


TAG = _snapshot_files.Tag('a-1', 5, 2, [0, 1], 1)


def test_a_tag_is_read_again_and_the_digests_are_those_of_the_arrays(tmp_path):
    path = str(tmp_path / 'file')
    written = _snapshot_files.write(path, ARRAYS, tag=TAG)
    assert tag_of(path) == written.tag
    assert written.tag._replace(state='', buffers='') == TAG
    data = (tmp_path / 'file').read_bytes()
    assert (written.bytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    _snapshot_files.write(path, ARRAYS)
    assert tag_of(path) is None


def digests(tmp_path, arrays, buffers=frozenset(), **tag):
    tag = TAG._replace(**tag)
    return _snapshot_files.write(str(tmp_path / 'file'), arrays, tag=tag, buffers=buffers).tag[-2:]


@pytest.mark.parametrize('key, is_common', [
    ('updater/model:main/l/W', True), ('updater/optimizer:main/t', True),
    ('updater/iteration', True), ('updater/iterator:main/order', False),
    ('updater/optimizer:main/compression/rank', False), ('extensions/LogReport/_log', False),
    ('_snapshot_elapsed_time', False), ('chainermn/random/numpy/gauss', False)])
def test_replicas_are_compared_by_what_they_share(tmp_path, key, is_common):
    arrays = {'updater/iteration': np.array(3), 'updater/model:main/l/W': np.ones(3)}
    before = digests(tmp_path, {**arrays, key: np.zeros(3)})
    after = digests(tmp_path, {**arrays, key: np.ones(3)}, rank=0)
    assert (before != after) == is_common
    assert before[1] == after[1]


def test_buffers_have_a_digest_of_their_own(tmp_path):
    model = chainer.Sequential(chainer.links.Linear(2, 2), chainer.links.BatchNormalization(2))
    arrays = _snapshot_files.copy_state(model)
    buffers = _snapshot_files.buffers_of(model, arrays)
    assert buffers == {'1/avg_mean', '1/avg_var', '1/N'}
    optimizer = chainer.optimizers.SGD().setup(model)
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator([1], 1), optimizer)
    trainer = chainer.training.Trainer(updater)
    keys = [f'updater/{key}' for key in _snapshot_files.copy_state(updater)]
    assert _snapshot_files.buffers_of(trainer, keys) == {
        f'updater/model:main/{name}' for name in buffers}

    before = digests(tmp_path, arrays, buffers)
    arrays['1/avg_mean'] += 1
    after = digests(tmp_path, arrays, buffers)
    assert before[0] == after[0] and before[1] != after[1]
    arrays['0/W'] += 1
    assert after[0] != digests(tmp_path, arrays, buffers)[0]


def test_objects_are_refused_before_they_are_saved():
    _snapshot_files.check_objects(ARRAYS)
    for bad in (np.array([None], dtype=object), np.array({}, dtype=object)):
        with pytest.raises(TypeError, match='bad is an array of Python objects'):
            _snapshot_files.check_objects({**ARRAYS, 'bad': bad})
