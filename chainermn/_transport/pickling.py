"""An object as it crosses MPI: pickled once, before anything is sent, its large buffers uncopied.

Pickle protocol 5 (PEP 574) leaves large buffers out of the stream.  Each travels as it is, which
saves a copy of every large array inside an object.
"""
from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from chainermn._consistency.mismatch import Refusal

#: Bytes of a message at most; not every MPI library has larger ones.
PIECE = 2**30


class Pickled:
    """An object that is pickled already.

    Pickling is where an object can be refused; this way it happens before the ranks agree.

    Raises:
        TypeError: If the object cannot be pickled.
    """

    def __init__(self, obj: Any) -> None:
        try:
            self.stream, self.buffers = MPI.pickle.dumps_oob(obj)
        except Exception as error:  # pickling runs code of the object
            raise TypeError(f'an object of {type(obj)} cannot be pickled: {error}') from error

    @property
    def parts(self) -> list[Any]:
        """The stream and the buffers, each as bytes."""
        parts: list[Any] = [self.stream, *self.buffers]
        return [np.frombuffer(part, np.uint8) for part in parts]

    def messages(self) -> Iterator[Any]:
        """What is sent: how many parts there are, how long each is, then the parts."""
        parts = self.parts
        yield np.array([len(parts)])
        yield np.array([part.nbytes for part in parts])
        yield from itertools.chain.from_iterable(map(pieces, parts))


def pieces(part: Any) -> Iterator[Any]:
    """Cuts a flat array of bytes into messages."""
    return (part[start:start + PIECE] for start in range(0, len(part), PIECE))


def load(stream: Any, buffers: Sequence[Any], source: int, rank: int) -> Any:
    """Unpickles an object.

    Args:
        stream: The stream.
        buffers: What it left out.
        source: The rank that pickled it, for errors.
        rank: This rank.

    Raises:
        Exception: Of the type that unpickling raises, or of its nearest base that Python has.
    """
    try:
        return pickle.loads(stream, buffers=buffers)
    except Exception as error:  # unpickling runs code of the object
        raise Refusal.of('', error).error(
            f'rank {rank} cannot unpickle the object of rank {source}: {type(error).__name__}: '
            f'{error}') from error
