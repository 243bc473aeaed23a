"""Pickled objects: serialized once, before anything is sent, without copying large buffers.

Pickle protocol 5 (PEP 574) keeps large buffers out of the stream. They are sent separately, which
saves a copy of every large array inside an object.
"""
from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np

from chainermn._consistency.mismatch import RemoteError
from chainermn._process.mpi import MPI
from chainermn._types import Buffer, Object

#: Maximum size of a message in bytes; some MPI libraries do not support larger ones.
CHUNK = 2**30

_loads: Callable[..., Object] = pickle.loads  # from any buffer, such as an array

#: Types of objects that have no buffers.
_PLAIN = frozenset({bool, bytes, complex, float, int, str, type(None)})


def dump(obj: Object) -> tuple[bytes, Sequence[Buffer]]:
    """Pickle an object; return the stream, and the buffers to send separately.

    Raises:
        TypeError: If the object cannot be pickled.
    """
    try:
        # mpi4py's pickle, which user code may have replaced with another library's.
        if type(obj) in _PLAIN:
            return MPI.pickle.dumps(obj), ()  # takes half the time of dumps_oob
        stream, buffers = MPI.pickle.dumps_oob(obj)
        return stream, cast('list[Buffer]', buffers)
    except Exception as error:  # pickling runs code of the object
        # Remove addresses (Python 3.14 prints them), so that the error is the same on all ranks.
        reason = re.sub(' at 0x[0-9a-f]+', '', str(error))
        raise TypeError(f'an object of {type(obj)} cannot be pickled: {reason}') from error


class Pickled:
    """A pickled object.

    Objects are pickled before the consistency check, so that all ranks raise an error if pickling
    fails.

    Raises:
        TypeError: If the object cannot be pickled.
    """

    __slots__ = 'buffers', 'stream'

    def __init__(self, obj: Object) -> None:
        self.stream, self.buffers = dump(obj)

    @property
    def parts(self) -> list[np.ndarray]:
        """The stream and the buffers, each as bytes."""
        return _parts(self.stream, self.buffers)

    def messages(self) -> Iterator[np.ndarray]:
        """Return the messages to send."""
        return messages(self.stream, self.buffers)


def messages(stream: bytes, buffers: Sequence[Buffer]) -> Iterator[np.ndarray]:
    """Return the messages to send: the number of parts, their lengths, then the parts."""
    parts = _parts(stream, buffers)
    yield np.array([len(parts)])
    yield np.array([part.nbytes for part in parts])
    yield from itertools.chain.from_iterable(map(chunks, parts))


def _parts(stream: bytes, buffers: Sequence[Buffer]) -> list[np.ndarray]:
    parts = cast('list[bytes]', [stream, *buffers])  # or mpi4py buffers
    return [np.frombuffer(part, np.uint8) for part in parts]


def chunks(part: np.ndarray) -> Iterator[np.ndarray]:
    """Split a flat array of bytes into messages."""
    return (part[start:start + CHUNK] for start in range(0, len(part), CHUNK))


def load(stream: Buffer, buffers: Sequence[Buffer], source: int, rank: int) -> Object:
    """Unpickle an object.

    Args:
        stream: The stream.
        buffers: The out-of-band buffers.
        source: The rank that pickled the object, for errors.
        rank: This rank.

    Raises:
        Exception: An error of the type that unpickling raised, or of its nearest built-in base
            class.
    """
    try:
        # Without the keyword, the call is faster.
        return _loads(stream, buffers=buffers) if buffers else _loads(stream)
    except Exception as error:  # unpickling runs code of the object
        raise RemoteError.of('', error).error(
            f'rank {rank} cannot unpickle the object of rank {source}: {type(error).__name__}: '
            f'{error}') from error
