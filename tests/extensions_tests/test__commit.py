"""A commit file is read as it was written, or not at all."""
import hashlib
import os

import hypothesis
import hypothesis.strategies as st
import pytest

from chainermn.extensions._commit import Commit, File, Names, digest

pytestmark = pytest.mark.mpi_skip

FILES = [File(rank, f'run.{rank}.5', 10 + rank, 'ab' * 32, 'same', f'own {rank}')
         for rank in range(2)]
COMMIT = Commit(5, 2, FILES)


def test_what_was_written_is_read(tmp_path):
    path = str(tmp_path / 'commit-run.5')
    COMMIT.write(path)
    assert Commit.read(path) == COMMIT and COMMIT.are_replicas
    other = Commit(5, 2, [FILES[0], File(1, 'run.1.5', 3, 'cd' * 32, 'other', '')])
    other.write(path)
    assert Commit.read(path) == other and not other.are_replicas
    assert os.listdir(tmp_path) == ['commit-run.5']


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp('commit') / 'commit-run.5'
    COMMIT.write(str(path))
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
    with pytest.raises(ValueError, match=r'is no commit file|was changed'):
        Commit.read(str(path))


@pytest.mark.parametrize('name', ['../run.0.5', '/etc/passwd', 'a/b'])
def test_files_of_another_folder_are_refused(tmp_path, name):
    path = str(tmp_path / 'commit-run.5')
    Commit(5, 1, [File(0, name, 1, '', '', '')]).write(path)
    with pytest.raises(ValueError, match='another folder'):
        Commit.read(path)


def test_a_file_is_compared_with_the_commit(tmp_path):
    content = os.urandom(3_000_000)
    path = tmp_path / 'run.0.5'
    path.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    assert digest(str(path)) == (len(content), sha256)
    file = File(0, 'run.0.5', len(content), sha256, '', '')
    assert file.problem(str(tmp_path)) is None
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert file.problem(str(tmp_path)) == f'{path}: the SHA-256 is wrong'
    path.write_bytes(content[:-1])
    assert file.problem(str(tmp_path)).endswith(
        'has 2,999,999 bytes, not the 3,000,000 that were committed')
    os.remove(path)
    assert file.problem(str(tmp_path)) == f'{path}: is missing'
    os.mkdir(path)
    assert 'IsADirectoryError' in file.problem(str(tmp_path))


def test_names_are_found_again(tmp_path):
    names = Names(str(tmp_path), lambda iteration, rank: (
        f'commit-a.b.{iteration}' if rank is None else f'a.b.{rank}.{iteration}'))
    for name in ['a.b.0.5', 'a.b.0.12', 'a.b.1.5', 'commit-a.b.5', 'a.0.7', 'a.b.0.x', 'a.b.0.',
                 'tmp-a.b.0.6.part', 'a.b.c.0.8']:
        (tmp_path / name).touch()
    assert names.find(0) == {i: str(tmp_path / f'a.b.0.{i}') for i in (5, 12)}
    assert names.find(None) == {5: str(tmp_path / 'commit-a.b.5')}
    assert Names(str(tmp_path / 'none'), names.make).find(0) == {}
