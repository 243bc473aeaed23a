"""Shards in tar files: a sample is a group of files with one stem, as in WebDataset."""
from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Sequence

import numpy as np

from chainermn._types import Object

_NAME = re.compile(r'((?:.*/)?[^./][^./]*)\.([^/]+)', re.DOTALL)

#: Offset and size of each file of a sample, by extension.
_Files = dict[str, tuple[int, int]]


class TarShard:
    """An uncompressed tar file.

    Opening it reads the headers of all files in it.

    Args:
        path: The tar file.

    Raises:
        ValueError, tarfile.TarError: If it is damaged, compressed, or has two files of one name.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, 'rb', buffering=0)  # noqa: SIM115
        try:
            self._samples = _find_samples(path, self._file.fileno())
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, indexes: np.ndarray) -> Sequence[Object]:
        """Return samples: dicts of bytes by extension, and ``'__key__'``, the stem."""
        samples = []
        for index in indexes.tolist():
            key, files = self._samples[index]
            sample: dict[str, Object] = {'__key__': key}
            for extension, (offset, size) in files.items():
                sample[extension] = data = os.pread(self._file.fileno(), size, offset)
                if len(data) != size:
                    raise ValueError(f'{key}.{extension} is truncated')
            samples.append(sample)
        return samples

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _find_samples(path: str, file: int) -> list[tuple[str, _Files]]:
    samples: list[tuple[str, _Files]] = []
    with tarfile.open(path, 'r:') as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined, unused-ignore]  # they take 1 KB each
            name = _NAME.fullmatch(member.name)
            if name is None or not member.isreg():
                continue
            key, extension = name[1], name[2].lower()
            if not samples or samples[-1][0] != key:
                samples.append((key, {}))
            files = samples[-1][1]
            if extension in files:
                raise ValueError(f'it contains two files named {member.name}')
            files[extension] = member.offset_data, member.size
        end: int = archive.offset
    # tarfile accepts an archive without an end.
    if os.pread(file, tarfile.BLOCKSIZE, end) != bytes(tarfile.BLOCKSIZE):
        raise ValueError('the tar file is truncated')
    return samples
