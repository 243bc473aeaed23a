"""The file of a rank is complete or absent, readable by Chainer, and has a tag."""
import hashlib
import os
import zipfile

import chainer
import numpy as np
import pytest

import chainermn
from chainermn.extensions._checkpointing import rank_file, state
from chainermn.extensions._checkpointing.npz import find_problem
from chainermn.extensions._checkpointing.parts import SavedParts
from chainermn.extensions._checkpointing.rank_file import Tag, read_tag

pytestmark = pytest.mark.mpi_skip

TAG = Tag('a-1', 5, 2, [0, 1], 1)
ARRAYS = {'x': np.arange(1000.0), 'y/z': np.asarray(None)}


def test_write_and_read(tmp_path):
    path = str(tmp_path / 'file.0.1')
    rank_file.write(path, ARRAYS, TAG)
    rank_file.write(path, ARRAYS, TAG)  # over an older one
    assert os.listdir(tmp_path) == ['file.0.1']
    assert find_problem(path) is None
    with np.load(path, allow_pickle=True) as read:
        np.testing.assert_array_equal(read['x'], ARRAYS['x'])
        assert read['y/z'].item() is None


def test_the_temporary_file_of_a_killed_process_is_replaced(tmp_path):
    """Also by a process of the same number, as in a container that is started again."""
    (tmp_path / 'tmp-file.part').write_bytes(b'torn' * 10000)
    rank_file.write(str(tmp_path / 'file'), ARRAYS, TAG)
    assert os.listdir(tmp_path) == ['file']
    assert find_problem(str(tmp_path / 'file')) is None


@pytest.mark.parametrize('compress', [False, True])
def test_chainer_reads_it(tmp_path, compress):
    model, loaded = chainer.links.BatchNormalization(2), chainer.links.BatchNormalization(2)
    model.gamma.array[...] = model.avg_mean[...] = 7
    path = str(tmp_path / 'file')
    rank_file.write(path, state.copy_state(model), TAG, compress=compress)
    chainer.serializers.load_npz(path, loaded)
    assert (loaded.gamma.array == 7).all() and (loaded.avg_mean == 7).all()
    with zipfile.ZipFile(path) as archive:
        assert {info.compress_type for info in archive.infolist()} == {8 if compress else 0}


def test_a_tag_is_read_again(tmp_path):
    path = str(tmp_path / 'file')
    rank_file.write(path, ARRAYS, TAG)
    tag = read_tag(path)
    assert len(tag.state) == len(tag.buffers) == 16
    assert tag == TAG._replace(state=tag.state, buffers=tag.buffers)
    with open(path, 'wb') as file:
        np.savez(file, **ARRAYS)
    assert read_tag(path) is None


def test_the_last_64_bytes_are_the_sha256_of_the_file(tmp_path):
    path = tmp_path / 'file'
    rank_file.write(str(path), {'x': np.frombuffer(os.urandom(3_000_000), np.uint8)}, TAG)
    content = path.read_bytes()
    expected = hashlib.sha256(content[:-64] + bytes(64)).hexdigest()
    assert content[-64:] == expected.encode()
    assert rank_file.find_problem(str(path), 1, TAG) is None


def test_each_problem_is_named(tmp_path):
    path = tmp_path / 'file'

    def find_problem(rank=1, first=TAG):
        return rank_file.find_problem(str(path), rank, first)

    assert find_problem() == f'{path}: the file is missing'
    rank_file.write(str(path), ARRAYS, TAG)
    assert find_problem(first=TAG._replace(rank=0)) is None
    assert find_problem(rank=0) == f'{path}: the file belongs to rank 1'
    for other in (TAG._replace(save='a-2'), None):
        assert find_problem(first=other) == (
            f'{path}: the file belongs to a different checkpoint than the first file')
    content = path.read_bytes()
    path.write_bytes(content.replace(np.float64(7).tobytes(), np.float64(8).tobytes(), 1))
    assert find_problem() == f'{path}: the SHA-256 is wrong'
    path.write_bytes(content[:-1])
    assert find_problem().startswith(f'{path}: ')
    with open(path, 'wb') as file:
        np.savez(file, **ARRAYS)
    assert find_problem(first=None) is None
    assert find_problem() == (
        f'{path}: the file belongs to a different checkpoint than the first file')
    os.remove(path)
    os.mkdir(path)
    assert 'Is a directory' in find_problem()


def test_flipped_bits_and_truncations_are_found(tmp_path):
    path = tmp_path / 'file'
    rank_file.write(str(path), {'x': np.arange(3)}, TAG)
    content = path.read_bytes()
    assert rank_file.find_problem(str(path), 1, TAG) is None
    for at in range(0, len(content), 3):
        bit = at * 5 % 8  # each third byte, and each bit of the structures
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1:])
        assert rank_file.find_problem(str(path), 1, TAG) is not None, (at, bit)
        path.write_bytes(content[:at])
        assert rank_file.find_problem(str(path), 1, TAG) is not None, at


def test_a_file_with_holes_is_not_read(tmp_path):
    path = str(tmp_path / 'file')
    with open(path, 'wb') as file:
        file.truncate(1 << 40)
    assert rank_file.find_problem(path, 1, TAG) is not None


def digests(tmp_path, arrays, buffers=frozenset(), own=frozenset(), **tag):
    path = str(tmp_path / 'file')
    rank_file.write(path, arrays, TAG._replace(**tag), buffers=buffers, own=own)
    return read_tag(path)[-2:]


@pytest.mark.parametrize('key, is_common', [
    ('updater/model:main/l/W', True), ('updater/optimizer:main/t', True),
    ('updater/iteration', True), ('updater/iterator:main/order', False),
    ('updater/optimizer:main/epoch', False), ('updater/optimizer:main/epoch/W/m', True),
    ('extensions/LogReport/_log', False),
    ('_snapshot_elapsed_time', False), ('chainermn/random/numpy/gauss', False)])
def test_replicas_are_compared_by_what_they_share(tmp_path, key, is_common):
    arrays = {'updater/iteration': np.array(3), 'updater/model:main/l/W': np.ones(3)}
    before = digests(tmp_path, {**arrays, key: np.zeros(3)})
    after = digests(tmp_path, {**arrays, key: np.ones(3)}, rank=0)
    assert (before != after) == is_common
    assert before[1] == after[1]


@pytest.mark.parametrize('key, changed', [('data/order', 0), ('optimizer/compression/rank', 7)])
def test_arrays_of_one_rank_are_not_compared(tmp_path, comm, key, changed):
    model = chainer.links.Linear(1, 1)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), comm, compression='2bit').setup(model)
    parts = SavedParts({'data': chainer.iterators.SerialIterator(range(9), 1), 'model': model,
                        'optimizer': optimizer})
    arrays = state.copy_state(parts.whole)
    own = parts.of_one_rank(arrays)
    before = digests(tmp_path, arrays, own=own)
    arrays[key] = np.full_like(arrays[key], changed)
    assert digests(tmp_path, arrays, own=own) == before != digests(tmp_path, arrays)
    arrays['model/W'] += 1
    assert digests(tmp_path, arrays, own=own) != before


def test_buffers_have_a_digest_of_their_own(tmp_path):
    model = chainer.Sequential(chainer.links.Linear(2, 2), chainer.links.BatchNormalization(2))
    arrays = state.copy_state(model)
    buffers = SavedParts(model).buffers(arrays)

    before = digests(tmp_path, arrays, buffers)
    arrays['1/avg_mean'] += 1
    after = digests(tmp_path, arrays, buffers)
    assert before[0] == after[0] and before[1] != after[1]
    arrays['0/W'] += 1
    assert after[0] != digests(tmp_path, arrays, buffers)[0]
