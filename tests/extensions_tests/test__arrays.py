"""Reading a file runs nothing that is in it, and damage is found."""
import os
import pickle
import zipfile

import chainer
import numpy as np
import pytest

from chainermn.extensions import _snapshot_files
from chainermn.extensions._arrays import DAMAGE, Arrays, problem_of, tag_of

ARRAYS = {'x': np.arange(1000.0), 'y/z': np.asarray(None), 'text': np.asarray('text')}


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, 'w')


def malicious(tmp_path, name='W'):
    """A file whose array makes another file if it is unpickled."""
    array = np.empty((), dtype=object)
    array[()] = Touches(str(tmp_path / 'touched'))
    path = str(tmp_path / 'file')
    np.savez(path, b=np.zeros(2, np.float32), **{name: array})
    os.rename(f'{path}.npz', path)
    return path


def test_what_was_written_is_read(tmp_path):
    path = str(tmp_path / 'file')
    _snapshot_files.write(path, ARRAYS)
    with Arrays(path, path) as arrays:
        assert sorted(arrays) == sorted(ARRAYS) and len(arrays) == 3
        np.testing.assert_array_equal(arrays['x'], ARRAYS['x'])
        assert arrays['y/z'].item() is None and arrays['text'].item() == 'text'
        with pytest.raises(KeyError):
            arrays['none']


@pytest.mark.parametrize('name', ['W', 'chainermn/save'])
def test_nothing_in_a_file_is_run(tmp_path, name):
    path = malicious(tmp_path, name)
    with pytest.raises(ValueError, match=f'(?s)file was not loaded: {name!r} is an array of Python '
                                         'objects.*allow_pickle=True'):
        Arrays(path, path)
    if name != 'W':
        with pytest.raises(DAMAGE):
            tag_of(path)
    assert problem_of(path) is None
    assert not (tmp_path / 'touched').exists()
    with Arrays(path, path, allow_pickle=True) as arrays:  # or the test tests nothing
        arrays[name].item().close()
    assert (tmp_path / 'touched').exists()


@pytest.mark.parametrize('protocol', [2, 3, 4, 5])
@pytest.mark.parametrize('module', [b'numpy.core', b'numpy._core'])
def test_none_of_any_version_is_known_without_unpickling(tmp_path, protocol, module):
    data = pickle.dumps(np.asarray(None), protocol)
    ours = b'numpy._core' if b'numpy._core' in data else b'numpy.core'
    old, new = ours + b'.multiarray', module + b'.multiarray'
    if protocol > 3:  # the length is before the text
        old, new = bytes([len(old)]) + old, bytes([len(new)]) + new
    assert old in data
    path = str(tmp_path / 'file')
    with zipfile.ZipFile(path, 'w') as archive, archive.open('none.npy', 'w') as file:
        np.lib.format.write_array_header_1_0(
            file, {'descr': '|O', 'fortran_order': False, 'shape': ()})
        file.write(data.replace(old, new))
    with Arrays(path, path) as arrays:
        assert arrays['none'].item() is None


def test_chainers_own_files_are_read(tmp_path):
    path = str(tmp_path / 'file')
    model = chainer.Sequential(chainer.links.Linear(None, 2))  # not initialized: None
    chainer.serializers.save_npz(path, model)
    with Arrays(path, path) as arrays:
        assert arrays['0/W'].item() is None
        chainer.serializers.NpzDeserializer(arrays).load(model)


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
            file.write(b'this is not a snapshot' * 1000)
    if damage == 'delete':
        os.remove(path)
    assert problem_of(path)
