"""Pickles objects to files, for the arguments and results of :func:`chainermn.launch`.

A file contains the pickle and the buffers of the arrays (PEP 574). Readers map the file into
memory, so all processes share one copy of a large array. A process that writes to the array gets
private copies of the pages it changes (copy-on-write).
"""
from __future__ import annotations

import io
import itertools
import mmap
import pickle
import struct

from chainermn._process.atomic_file import open_atomic
from chainermn._types import Object

_ALIGNMENT = 64  # bytes, as in NumPy


def save(path: str, obj: Object) -> None:
    """Write an object with cloudpickle; the file appears only when it is complete.

    Args:
        path: Path of the file.
        obj: The object.

    Raises:
        TypeError: If the object cannot be pickled.
    """
    from chainermn._process.pickler import Pickler  # imports cloudpickle; few scripts call launch

    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    try:
        Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(obj)
        parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    except Exception as error:  # pickling can run arbitrary code
        raise TypeError(f'cannot be pickled: {type(error).__name__}: {error}') from error
    with open_atomic(path, sync=False) as file:
        file.write(struct.pack(f'{len(parts) + 1}q', len(parts), *(part.nbytes for part in parts)))
        for part in parts:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            file.write(part)


def load(path: str) -> Object:
    """Read an object. Its arrays stay valid after the file is removed.

    Args:
        path: Path of a file that :func:`save` wrote.
    """
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
