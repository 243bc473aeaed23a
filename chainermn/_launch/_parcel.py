"""An object in a file: what :func:`chainermn.launch` hands to its processes, and gets back.

The file holds the object's pickle and, beside it, the buffers of its arrays (PEP 574).  Whoever
loads it maps the file, so an array of a gigabyte is written once and in memory once, however many
processes read it.  One that writes to its array gets pages of its own.
"""
from __future__ import annotations

import itertools
import mmap
import os
import pickle
import struct
from typing import Any

_ALIGNMENT = 64  # bytes; as NumPy aligns arrays


def save(path: str, obj: Any) -> None:
    """Writes an object, with cloudpickle; the file has its name once it is whole.

    Raises:
        TypeError: If the object cannot be pickled.
    """
    import cloudpickle  # here, as few programs launch

    buffers: list[pickle.PickleBuffer] = []
    try:
        stream = cloudpickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(stream), *(buffer.raw() for buffer in buffers)]
    except Exception as error:  # pickling runs code of the object
        raise TypeError(f'cannot be pickled: {type(error).__name__}: {error}') from error
    with open(f'{path}.part', 'wb') as file:
        file.write(struct.pack(f'{len(parts) + 1}q', len(parts), *(part.nbytes for part in parts)))
        for part in parts:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            file.write(part)
    os.rename(f'{path}.part', path)


def load(path: str) -> Any:
    """Reads an object; its arrays are parts of the file, which may be removed nevertheless."""
    with open(path, 'rb') as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    (count,) = struct.unpack_from('q', content)
    end = 8 * (count + 1)
    sizes = content[8:end].cast('q')
    starts = []
    for size in sizes:
        starts.append(end + -end % _ALIGNMENT)
        end = starts[-1] + size
    stream, *buffers = itertools.starmap(
        lambda start, size: content[start:start + size], zip(starts, sizes, strict=True))
    return pickle.loads(stream, buffers=buffers)
