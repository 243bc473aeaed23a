"""Snapshot files: a copy of a state, written whole or not at all, that says what it belongs to."""
from __future__ import annotations

import copy
import hashlib
import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import chainer
import numpy as np

from chainermn.extensions import _durable

TAG = 'chainermn/save'  # the member of a file that is its Tag
_PIECE = 1 << 20  # bytes; it is still in the cache when its checksum is known


class Tag(NamedTuple):
    """What a file says of itself, so that files of different saves are never taken for one."""

    save: str  # the same in all files of one save, and in no other
    iteration: int
    size: int  # ranks of the job
    writers: list[int]  # the ranks that wrote a file each
    rank: int  # the one that wrote this file
    state: str = ''  # digests of what replicas have in common: parameters, optimizer, iteration
    buffers: str = ''  # and of the models' other arrays, such as averages of batch normalization


class Written(NamedTuple):
    """What is known of a file that was written."""

    bytes: int
    sha256: str
    tag: Tag | None


class _Copying(chainer.serializers.DictionarySerializer):
    """A DictionarySerializer whose arrays nobody else has."""

    def __getitem__(self, key: str) -> _Copying:
        return _Copying(self.target, self.path + key.strip('/') + '/')

    def __call__(self, key: str, value: Any) -> Any:
        super().__call__(key, value)
        if not isinstance(value, chainer.backends.cuda.ndarray):  # which has come to the host
            name = self.path + key.lstrip('/')
            self.target[name] = copy_array(self.target[name])
        return value


def copy_state(target: Any) -> dict[str, Any]:
    """Copies all that an object serializes, to host arrays by name.  Waits for the GPU."""
    serializer = _Copying()
    serializer.save(target)
    return serializer.target


def copy_array(array: Any) -> Any:
    """Copies an array, and the objects in it."""
    return copy.deepcopy(array) if array.dtype.hasobject else array.copy(order='K')


def check_objects(arrays: Mapping[str, Any]) -> None:
    """Refuses arrays that would not be loaded again.

    Raises:
        TypeError: If there is an array of objects other than ``None``.
    """
    for key, array in arrays.items():
        if array.dtype.hasobject and (array.ndim or array.item() is not None):
            raise TypeError(
                f'{key} is an array of Python objects ({array.dtype}): to load it runs code that '
                'the file holds, which is off; save numbers or text, or pass allow_pickle=True '
                'where the extension is made')


def buffers_of(target: Any, keys: Iterable[str]) -> set[str]:
    """Names of the models' arrays that are not parameters, which replicas need not share."""
    models: dict[str, Any] = {}
    if isinstance(target, chainer.Link):
        models[''] = target
    elif hasattr(getattr(target, 'updater', None), 'get_all_optimizers'):
        for name, optimizer in target.updater.get_all_optimizers().items():
            models[f'updater/model:{name}/'] = optimizer.target
    buffers: set[str] = set()
    for prefix, model in models.items():
        parameters = {prefix + path.lstrip('/') for path, _ in model.namedparams()}
        buffers.update(key for key in keys if key.startswith(prefix) and key not in parameters)
    return buffers


def is_common(key: str, is_trainer: bool) -> bool:
    """Whether all replicas have the same there; a trainer's iterators and extensions differ."""
    if not is_trainer:
        return not key.startswith('chainermn/')
    return key.startswith('updater/') and not re.match(
        r'updater/(iterator:|optimizer:[^/]*/compression/)', key)


def write(path: str, arrays: Mapping[str, Any], compress: bool = False, tag: Tag | None = None,
          buffers: set[str] | frozenset[str] = frozenset()) -> Written:
    """Writes arrays to an npz file that is whole whenever it is there.

    Args:
        path: The file.
        arrays: By name.
        compress: Whether to.
        tag: Written as well, with the digests of these arrays.
        buffers: Names of those that replicas need not have in common.

    Returns:
        What the file is then.

    Raises:
        OSError: If the file cannot be written.  No file of that name is touched then.
    """
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with _durable.replacing(path) as file:
        out = _Digesting(file)
        # numpy.savez of NumPy 1.26 leaves its archive open if an array cannot be written.
        with zipfile.ZipFile(out, 'w', method) as archive:  # type: ignore[call-overload]
            def add(key: str, value: Any) -> None:
                with archive.open(f'{key}.npy', 'w', force_zip64=True) as member:
                    _write_array(member, np.asanyarray(value))

            for key, value in arrays.items():
                add(key, value)
            if tag is not None:
                checksums = {info.filename[:-4]: info.CRC for info in archive.infolist()}
                tag = _with_digests(tag, checksums, buffers)
                add(TAG, np.frombuffer(json.dumps(tag._asdict()).encode(), np.uint8))
    return Written(out.bytes, out.sha256.hexdigest(), tag)


def _with_digests(tag: Tag, checksums: Mapping[str, int], buffers: set[str] | frozenset[str]
                  ) -> Tag:
    is_trainer = 'updater/iteration' in checksums
    digests = {False: hashlib.sha256(), True: hashlib.sha256()}
    for key, checksum in sorted(checksums.items()):
        if is_common(key, is_trainer):
            digests[key in buffers].update(f'{key} {checksum}\n'.encode())
    state, others = (digests[which].hexdigest()[:16] for which in (False, True))
    return tag._replace(state=state, buffers=others)


class _Digesting:
    """What is written to a file, and the digest of it.  Has no position, so that none is redone."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _write_array(file: Any, array: Any) -> None:
    """Writes what ``numpy.lib.format.write_array`` does, and lets other threads run meanwhile.

    That one holds the interpreter, and so the training, while it copies pieces of 16 MB.
    """
    if array.dtype.hasobject or array.dtype.names:
        np.lib.format.write_array(file, array)
        return
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(file, header)
    data = np.ascontiguousarray(array.T if header['fortran_order'] else array)
    content = data.reshape(-1).view(np.uint8)
    for start in range(0, len(content), _PIECE):
        file.write(content[start:start + _PIECE])
