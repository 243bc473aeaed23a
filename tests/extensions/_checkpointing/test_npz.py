"""Reading a file runs no code from it, and damage is found."""
import io
import json
import os
import pickle
import tracemalloc
import zipfile

import chainer
import numpy as np
import pytest

from chainermn.extensions._checkpointing.npz import Arrays, find_problem, write_array
from chainermn.extensions._checkpointing.rank_file import Tag, read_tag

pytestmark = pytest.mark.mpi_skip

TAG = Tag('a-1', 1, 1, [0], 0, 'same', 'own')


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


@pytest.mark.parametrize('name', ['W', 'chainermn/save'])
def test_nothing_in_a_file_is_run(tmp_path, name):
    path = malicious(tmp_path, name)
    with pytest.raises(ValueError, match=f'(?s)file was not loaded: {name!r} is an array of Python '
                                         'objects.*allow_pickle=True'):
        Arrays(path, path)
    if name != 'W':
        with pytest.raises(ValueError):
            read_tag(path)
    assert find_problem(path) is None
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


@pytest.mark.parametrize('array', [
    np.arange(6, dtype='>i2').reshape(2, 3), np.asfortranarray(np.ones((3, 2))), np.float16(3),
    np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1), np.arange(10)[::2], np.empty((0, 3)),
    np.array(['a', 'bc']), np.array(['2020-01-01'], 'M8[D]'), np.array([(1, 2.0)], 'i4,f8'),
    np.array([[1], None], dtype=object), np.arange(300_000.0), np.array([True, False])],
    ids=lambda array: f'{array.dtype}{array.shape}')
def test_files_are_those_of_numpy(array):
    ours, theirs = io.BytesIO(), io.BytesIO()
    write_array(ours, np.asanyarray(array))
    np.lib.format.write_array(theirs, np.asanyarray(array))
    assert ours.getvalue() == theirs.getvalue()


# --- crafted files ----------------------------------------------------------------------------

def npy(descr, shape, content=b''):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {'descr': descr, 'fortran_order': False, 'shape': shape})
    return file.getvalue() + content


def archive_of(tmp_path, name, content, method=zipfile.ZIP_STORED):
    path = str(tmp_path / 'file')
    with zipfile.ZipFile(path, 'w', method) as archive:
        archive.writestr(f'{name}.npy', content)
    return path


def raised(function, *args):
    """Return the error, and the peak of allocated bytes."""
    tracemalloc.start()
    try:
        function(*args)
    except Exception as error:
        return error, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    raise AssertionError('nothing was raised')


HUGE = 300_000_000


@pytest.mark.parametrize('method', [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize('descr, shape', [
    ('|u1', (HUGE,)), ('|u1', (HUGE, HUGE, HUGE)), ('|u1', (2 ** 32, 2 ** 32)), ('|u1', (-1,)),
    (f'|V{HUGE}', (1,)), ('|V0', (HUGE,)), ('|S0', (HUGE,)), ('<f8', (0,) * 100), ('<f8', (1,))])
def test_memory_that_an_array_only_claims_is_not_allocated(tmp_path, descr, shape, method):
    for name in ('x', 'chainermn/save'):
        path = archive_of(tmp_path, name, npy(descr, shape, b'1234'), method)
        tracemalloc.start()
        assert find_problem(path)
        assert tracemalloc.get_traced_memory()[1] < HUGE / 30
        tracemalloc.stop()
    error, peak = raised(read_tag, path)
    assert isinstance(error, ValueError) and peak < HUGE / 30


def test_members_that_an_archive_only_claims_are_not_read(tmp_path):
    """Its directory says how large the members are."""
    path = archive_of(tmp_path, 'chainermn/save', npy('|u1', (HUGE,)))
    with open(path, 'rb') as file:
        content = file.read()
    size = (os.path.getsize(path) - 22 - 46 - len('chainermn/save.npy')
            - 30 - len('chainermn/save.npy')).to_bytes(4, 'little')
    large = (HUGE + 128).to_bytes(4, 'little')
    assert content.count(size + size) == 2
    for claimed in (large + large, size + large):
        with open(path, 'wb') as file:
            file.write(content.replace(size + size, claimed))
        assert 'more than the file can hold' in find_problem(path)
        error, peak = raised(read_tag, path)
        assert isinstance(error, ValueError) and peak < HUGE / 30


def test_a_header_that_takes_much_memory_is_not_read(tmp_path):
    size = 30_000_000
    content = b'\x93NUMPY\x02\x00' + size.to_bytes(4, 'little') + b' ' * size
    path = archive_of(tmp_path, 'x', content, zipfile.ZIP_DEFLATED)
    assert os.path.getsize(path) < size / 500
    del content
    tracemalloc.start()
    assert find_problem(path)
    assert tracemalloc.get_traced_memory()[1] < size / 3
    tracemalloc.stop()


def tagged(tmp_path, text):
    content = npy('|u1', (len(text),), text)
    return archive_of(tmp_path, 'chainermn/save', content)


def test_a_tag_of_any_json_is_known_or_an_error(tmp_path):
    def tag_in(fields):
        return read_tag(tagged(tmp_path, json.dumps(fields).encode()))

    assert tag_in(TAG._asdict()) == TAG
    for key in TAG._fields:
        for value in (None, True, 1.5, [], {}, {'a': 1}, [[0]], ['0'], [0, 0], [1, 0], 'x', -1):
            if type(value) is not type(getattr(TAG, key)) or isinstance(value, list):
                with pytest.raises(ValueError, match='unknown tag'):
                    tag_in({**TAG._asdict(), key: value})


@pytest.mark.parametrize('text', [
    b'[' * 100_000, b'{"save":' * 100_000, b'null', b'1', b'[]', b'"', b'\xff', b'1' * 5000, b''])
def test_a_tag_that_is_none(tmp_path, text):
    path = tagged(tmp_path, text)
    with pytest.raises(Exception) as caught:
        read_tag(path)
    assert isinstance(caught.value, (ValueError, RecursionError))
