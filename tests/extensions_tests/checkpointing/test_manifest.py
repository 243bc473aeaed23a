"""A manifest is read as it was written, or not at all."""
import hashlib
import io
import json
import os
import zipfile

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from chainermn.extensions._checkpointing import rank_file
from chainermn.extensions._checkpointing.manifest import Manifest, SaveName, SaveNames
from chainermn.extensions._checkpointing.rank_file import FileRecord, Tag, digest

pytestmark = pytest.mark.mpi_skip

FILES = [FileRecord(rank, f'run.{rank}.5', 10 + rank, 'ab' * 32, 'same', f'own {rank}')
         for rank in range(2)]
MANIFEST = Manifest(5, 2, FILES)


def test_write_and_read(tmp_path):
    path = str(tmp_path / 'commit-run.5')
    MANIFEST.write(path)
    assert Manifest.read(path) == MANIFEST and MANIFEST.are_replicas
    other = Manifest(5, 2, [FILES[0], FileRecord(1, 'run.1.5', 3, 'cd' * 32, 'other', '')])
    other.write(path)
    assert Manifest.read(path) == other and not other.are_replicas
    assert os.listdir(tmp_path) == ['commit-run.5']


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp('manifest') / 'commit-run.5'
    MANIFEST.write(str(path))
    return path, path.read_bytes()


@hypothesis.given(st.data())
def test_any_change_is_found(written, data):
    path, content = written
    at = data.draw(st.integers(0, len(content) - 1))
    changed = data.draw(st.sampled_from([
        content[:at], content[:at] + content[at + 1:], content + content[:at + 1],
        content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1:],
        content[:at] + b'0' * (len(content) - at), content.replace(b'10', b'11')]))
    hypothesis.assume(changed != content)
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=r'is not a manifest|was changed'):
        Manifest.read(str(path))


@pytest.mark.parametrize('name', ['../run.0.5', '/etc/passwd', 'a/b'])
def test_files_of_another_folder_are_refused(tmp_path, name):
    path = str(tmp_path / 'commit-run.5')
    Manifest(5, 1, [FileRecord(0, name, 1, '', '', '')]).write(path)
    with pytest.raises(ValueError, match='another folder'):
        Manifest.read(path)


def test_a_file_is_compared_with_the_manifest(tmp_path):
    path = tmp_path / 'run.0.5'
    rank_file.write(str(path), {'x': np.frombuffer(os.urandom(3_000_000), np.uint8)},
                    Tag('a-5', 5, 1, [0], 0))
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    assert digest(str(path)) == (len(content), sha256)
    file = FileRecord(0, 'run.0.5', len(content), sha256, '', '')
    assert file.find_problem(str(tmp_path)) is None
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert file.find_problem(str(tmp_path)) == f'{path}: the SHA-256 is wrong'
    path.write_bytes(content[:-1])
    assert file.find_problem(str(tmp_path)).endswith(
        f'has {len(content) - 1:,} bytes, not {len(content):,} as in the manifest')
    os.remove(path)
    assert file.find_problem(str(tmp_path)) == f'{path}: is missing'
    os.mkdir(path)
    assert 'IsADirectoryError' in file.find_problem(str(tmp_path))


# --- crafted files ----------------------------------------------------------------------------

ODD = [None, True, 1.5, -1, 10 ** 30, 'x', '', '..', '\0', '\ud800', [], [[]], {}, {'a': 1}]


def signed(body):
    """A manifest whose own SHA-256 is right."""
    body = {key: value for key, value in body.items() if key != 'sha256'}
    body['sha256'] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps(body, indent=1) + '\n'


def judged(folder):
    """Read a manifest and its files; raise nothing, or a ValueError."""
    try:
        manifest = Manifest.read(str(folder / 'commit-run.5'))
    except ValueError as error:
        assert 'is not a manifest' in str(error) or 'was changed' in str(error)
        return False
    for file in manifest.files:
        assert isinstance(file.find_problem(str(folder)), str)  # there are no files
    return True


def test_any_json_is_a_manifest_or_a_value_error(tmp_path):
    path = tmp_path / 'commit-run.5'
    MANIFEST.write(str(path))
    body = json.loads(path.read_text())
    assert judged(tmp_path) and path.read_text() == signed(body)
    kinds = {'format': int, 'iteration': int, 'ranks': int, 'files': list}
    for key, kind in kinds.items():
        for odd in ODD:
            path.write_text(signed({**body, key: odd}))
            assert not judged(tmp_path) or (type(odd) is kind and key != 'files')
        path.write_text(signed({one: value for one, value in body.items() if one != key}))
        assert not judged(tmp_path)
    for key, value in body['files'][0].items():
        for odd in ODD:
            path.write_text(signed({**body, 'files': [{**body['files'][0], key: odd}]}))
            assert not judged(tmp_path) or type(odd) is type(value)
    for odd in ODD:
        path.write_text(json.dumps(odd))
        assert not judged(tmp_path)


@pytest.mark.parametrize('text', ['[' * 100_000, '{"format":' * 100_000, '1' * 5000, '"', ''])
def test_json_that_is_none(tmp_path, text):
    (tmp_path / 'commit-run.5').write_text(text)
    assert not judged(tmp_path)


def test_a_manifest_that_is_much_too_large_is_not_read(tmp_path):
    with open(tmp_path / 'commit-run.5', 'w') as file:
        file.truncate(1 << 40)  # it has holes
    assert not judged(tmp_path)


def test_a_file_of_another_size_is_not_read(tmp_path):
    with open(tmp_path / 'run.0.5', 'w') as file:
        file.truncate(1 << 40)
    assert 'bytes, not 10 as in the manifest' in FILES[0].find_problem(str(tmp_path))


def test_a_file_that_claims_more_than_it_has_is_a_problem(tmp_path):
    """It is as in the manifest; loading it would take the memory that it claims."""
    path = str(tmp_path / 'run.0.5')
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {'descr': '|u1', 'fortran_order': False, 'shape': (3_000_000_000,)})
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('x.npy', header.getvalue())
    file = FileRecord(0, 'run.0.5', *digest(path), '', '')
    assert 'x.npy claims an array of shape (3000000000,)' in file.find_problem(str(tmp_path))


def test_names_are_found_again(tmp_path):
    names = SaveNames(str(tmp_path), lambda iteration: SaveName('a.b.', f'.{iteration}'))
    for name in ['a.b.0.5', 'a.b.0.12', 'a.b.1.5', 'commit-a.b.5', 'a.0.7', 'a.b.0.x', 'a.b.0.',
                 'tmp-a.b.0.6.part', 'a.b.c.0.8']:
        (tmp_path / name).touch()
    assert names.find(0) == {i: str(tmp_path / f'a.b.0.{i}') for i in (5, 12)}
    assert names.find(None) == {5: str(tmp_path / 'commit-a.b.5')}
    assert SaveNames(str(tmp_path / 'none'), names.of).find(0) == {}
    assert names.find_temporary(0) == [str(tmp_path / 'tmp-a.b.0.6.part')]
