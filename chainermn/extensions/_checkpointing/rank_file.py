"""The file of one rank: an npz file with a tag that identifies the checkpoint.

There is no manifest: it could only be written after communication, so the last checkpoint before a
failure would have none.

The last 64 bytes are the SHA-256 of the file. They are the comment of the archive, which contains
zeros while the SHA-256 is computed.
"""
from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Collection, Iterable, Mapping
from typing import IO, NamedTuple

import numpy as np

from chainer_compat.updates.sharded_states import ENTRY
from chainermn._process.atomic_file import open_atomic
from chainermn.extensions._checkpointing import npz

TAG = 'chainermn/save'  # name of the array with the tag, as JSON
_MAX_TAG = 1 << 26  # bytes; the tag of a million ranks has 8 MB
_UNSIGNED = bytes(64)


class Tag(NamedTuple):
    """The checkpoint that a file belongs to.

    A checkpoint is complete if there is a file of each writer.
    """

    save: str  # unique identifier, the same in all files of the checkpoint
    iteration: int
    size: int  # number of ranks of the job
    writers: list[int]  # the ranks that each wrote a file
    rank: int  # the rank that wrote this file
    state: str = ''  # digest of the part that replicas share: parameters, optimizer, iteration
    buffers: str = ''  # digest of the models' other arrays, e.g. means of batch normalization


def write(path: str, arrays: Mapping[str, np.ndarray], tag: Tag, *, compress: bool = False,
          buffers: Collection[str] = (), own: Collection[str] = ()) -> None:
    """Write arrays and a tag to an npz file, atomically.

    Args:
        path: Path of the file.
        arrays: Arrays by name.
        tag: The tag, without digests.
        compress: Whether to compress the file.
        buffers: Names of the models' arrays in which replicas may differ.
        own: Names of the arrays that belong to a single rank, such as arrays of iterators.

    Raises:
        OSError: If the file cannot be written. An old file is then unchanged.
    """
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with open_atomic(path) as file:
        out = _Digest(file)
        # numpy.savez in NumPy 1.26 would leave its archive open if an array cannot be written.
        with zipfile.ZipFile(out, 'w', method) as archive:  # type: ignore[call-overload]
            archive.comment = _UNSIGNED
            for key, array in arrays.items():
                npz.add_array(archive, key, array)
            tag = _with_digests(tag, {info.filename.removesuffix('.npy'): info.CRC
                                      for info in archive.infolist()}, buffers, own)
            text = json.dumps(tag._asdict()).encode()
            npz.add_array(archive, TAG, np.frombuffer(text, np.uint8))
        file.seek(-len(_UNSIGNED), os.SEEK_END)
        file.write(out.sha256.hexdigest().encode())


def _with_digests(tag: Tag, checksums: Mapping[str, int], buffers: Collection[str],
                  own: Collection[str]) -> Tag:
    is_trainer = 'updater/iteration' in checksums
    sharded = sharded_states(checksums)
    state, others = hashlib.sha256(), hashlib.sha256()
    for key, checksum in sorted(checksums.items()):
        if key not in sharded and key not in own and _is_shared(key, is_trainer):
            (others if key in buffers else state).update(f'{key} {checksum}\n'.encode())
    return tag._replace(state=state.hexdigest()[:16], buffers=others.hexdigest()[:16])


def sharded_states(keys: Collection[str]) -> set[str]:
    """Return the names of the arrays that contain one rank's shard of an optimizer's states."""
    entries = {key.removesuffix(ENTRY) for key in keys if key.endswith(f'/{ENTRY}')}
    # Skip deeper keys: if a parameter is named 'chainermn', the states of ChainerMN's own objects
    # have such keys.
    return {key for key in keys
            if key[:key.rfind('/') + 1] in entries and not key.endswith('/t')}


def _is_shared(key: str, is_trainer: bool) -> bool:
    """Return whether all replicas have the same array; a trainer's iterators and extensions differ.

    The epochs of its optimizers also differ if the datasets have different lengths.
    """
    if 'chainermn' in key.split('/')[:-1]:  # saved by ChainerMN's objects for a single rank
        return False
    return not is_trainer or (key.startswith('updater/') and not re.match(
        r'updater/(iterator:|optimizer:[^/]*/epoch$)', key))


def accumulated(keys: Iterable[str]) -> list[str]:
    """Return the names of the arrays that contain one rank's accumulated gradients."""
    return [key for key in keys if '/chainermn/accumulation/' in f'/{key}']


def needs_others(path: str) -> bool:
    """Return whether loading a file on a different number of ranks requires all ranks' files."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    return bool(accumulated(names)) or any(name.endswith(f'/{ENTRY}.npy') for name in names)


def read_tag(path: str) -> Tag | None:
    """Read the tag of a file.

    Returns:
        The tag; ``None`` for a file of ChainerMN 7.

    Raises:
        Exception: An error of almost any type, if the file cannot be read or is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        npz.check_directory(archive)
        if f'{TAG}.npy' not in archive.namelist():
            return None
        member = archive.getinfo(f'{TAG}.npy')
        npz.check_member(archive, member)
        if member.file_size > _MAX_TAG:
            raise ValueError(f'the tag claims to have {member.file_size:,} bytes; the maximum is '
                             f'{_MAX_TAG:,}')
        with archive.open(member) as file:
            text = np.lib.format.read_array(file, allow_pickle=False).tobytes()
    fields = json.loads(text)
    if not isinstance(fields, dict) or set(fields) != set(Tag._fields):
        raise ValueError(f'unknown tag: {text[:80]!r}')
    tag = Tag(**fields)
    numbers, texts = [tag.iteration, tag.size, tag.rank], [tag.save, tag.state, tag.buffers]
    if (not isinstance(tag.writers, list) or not tag.writers
            or not all(type(number) is int for number in numbers + tag.writers)
            or tag.writers != sorted(set(tag.writers))
            or not all(isinstance(one, str) for one in texts)):
        raise ValueError(f'unknown tag: {text[:80]!r}')  # file names are built from it
    return tag


def find_problem(path: str, rank: int, first: Tag | None) -> str | None:
    """Read a whole file and check that it belongs to the checkpoint.

    Args:
        path: Path of the file.
        rank: The rank that wrote it.
        first: Tag of the first file of the checkpoint; ``None`` for a checkpoint of ChainerMN 7,
            for which only the CRC-32 of each array is checked.

    Returns:
        The path of the file and the problem; ``None`` if there is no problem.
    """
    try:
        tag = read_tag(path)
        if tag is not None and not _has_right_digest(path):
            problem: str | None = 'the SHA-256 is wrong'
        elif (tag and tag.save) != (first and first.save):
            problem = 'the file belongs to a different checkpoint than the first file'
        elif tag is not None and tag.rank != rank:
            problem = f'the file belongs to rank {tag.rank}'
        else:
            problem = npz.find_problem(path, is_verified=tag is not None)
    except FileNotFoundError:
        problem = 'the file is missing'
    except Exception as error:
        problem = str(error) or type(error).__name__
    return problem and f'{path}: {problem}'


def _has_right_digest(path: str) -> bool:
    sha256 = hashlib.sha256()
    chunk = memoryview(bytearray(1 << 20))
    with open(path, 'rb', buffering=0) as file:
        rest = os.fstat(file.fileno()).st_size - len(_UNSIGNED)
        while rest > 0 and (count := file.readinto(chunk[:rest])):
            sha256.update(chunk[:count])
            rest -= count
        sha256.update(_UNSIGNED)
        return file.read() == sha256.hexdigest().encode()


class _Digest:
    """A file that computes its SHA-256. It cannot seek, so zipfile writes each byte only once."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self.sha256.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()
