"""Shards in tar files: a sample is a group of files with the same stem, as in WebDataset."""
from __future__ import annotations

import os
import posixpath
import re
import tarfile
from collections.abc import Mapping, Sequence

import numpy as np

from chainermn._types import Object

_NAME = re.compile(r'((?:.*/)?[^./][^./]*)\.([^/]+)', re.DOTALL)

#: Members that are not files: a label, and a list of files in an incremental backup.
_LABEL, _LIST = b'V', b'D'

#: The maximum number of symbolic links in a chain.
_MAX_LINKS = 40

#: Offset and size of a file; the header of a sparse file.
_File = tuple[int, int] | tarfile.TarInfo
#: A file; the target of a symbolic link; ``None`` for folders and devices.
_Member = _File | str | None
_Sample = tuple[str, dict[str, _File]]  # the stem, and the files by extension


class TarShard:
    """An uncompressed tar file.

    Opening it reads the headers of all files in it.

    Args:
        path: The tar file.

    Raises:
        ValueError, tarfile.TarError: If the tar file is damaged or compressed, or if it contains
            two files of the same name or a link to a file outside it.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, 'rb', buffering=0)  # noqa: SIM115
        try:
            self._archive = tarfile.open(fileobj=self._file, mode='r:')  # noqa: SIM115
            self._samples = _find_samples(self._archive)
            # tarfile accepts an archive without an end marker.
            end: int = self._archive.offset
            if os.pread(self._file.fileno(), tarfile.BLOCKSIZE, end) != bytes(tarfile.BLOCKSIZE):
                raise ValueError('the tar file is truncated')
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, indexes: np.ndarray) -> Sequence[Object]:
        """Return samples: dicts with bytes by extension, and with the stem as ``'__key__'``."""
        samples = []
        for index in indexes.tolist():
            key, files = self._samples[index]
            sample: dict[str, Object] = {'__key__': key}
            for extension, file in files.items():
                if isinstance(file, tarfile.TarInfo):
                    sample[extension] = self._read_sparse(file)
                    continue
                offset, size = file
                sample[extension] = data = os.pread(self._file.fileno(), size, offset)
                if len(data) != size:
                    raise ValueError(f'{key}.{extension} is truncated')
            samples.append(sample)
        return samples

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_sparse(self, header: tarfile.TarInfo) -> bytes:
        opened = self._archive.extractfile(header)
        assert opened is not None  # it is a regular file
        with opened:
            return opened.read()


def _find_samples(archive: tarfile.TarFile) -> list[_Sample]:
    samples: list[_Sample] = []
    members: dict[str, _Member] = {}  # by normalized name
    links = []
    while (header := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined, unused-ignore]  # they take 1 KB each
        # tarfile prefers another header, which sparse files with long or unusual names also have.
        header.name = header.pax_headers.get('GNU.sparse.name', header.name)
        name = posixpath.normpath(header.name)
        members[name] = member = _member(header, members)
        match = _NAME.fullmatch(header.name)
        if match is None or member is None:
            continue
        key, extension = match[1], match[2].lower()
        if not samples or samples[-1][0] != key:
            samples.append((key, {}))
        files = samples[-1][1]
        if extension in files:
            raise ValueError(f'the tar file contains two files named {header.name}')
        if isinstance(member, str):
            links.append((files, extension, name))
            member = 0, 0  # a placeholder, which keeps the order
        files[extension] = member
    for files, extension, name in links:  # they may point to later members
        if target := _follow(name, members):
            files[extension] = target
        else:
            del files[extension]
    return [sample for sample in samples if sample[1]]


def _member(header: tarfile.TarInfo, before: Mapping[str, _Member]) -> _Member:
    if header.isreg():
        return header if header.issparse() else (header.offset_data, header.size)
    if header.issym():
        return header.linkname
    if header.islnk():
        target = posixpath.normpath(header.linkname)
        if target not in before:
            raise ValueError(f'{header.name} is a hard link to {header.linkname}, which does not '
                             'come earlier in the tar file')
        return before[target]
    if header.type not in (*tarfile.SUPPORTED_TYPES, _LABEL, _LIST):
        raise ValueError(f'{header.name} has the unknown type {header.type!r}')
    return None


def _follow(name: str, members: Mapping[str, _Member]) -> _File | None:
    """Return the file to which a symbolic link points; ``None`` for a folder or a device."""
    target = name
    for _ in range(_MAX_LINKS):
        member = members.get(target, '')
        if not isinstance(member, str):
            return member
        if not member:
            break
        target = posixpath.normpath(posixpath.join(posixpath.dirname(target), member))
    raise ValueError(f'{name} is a symbolic link to {members[name]}, which is not in the tar file. '
                     'Create the tar file with tar --dereference.')
