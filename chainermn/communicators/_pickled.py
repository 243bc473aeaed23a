"""How an object crosses MPI: pickled once, before anything is sent, its large buffers uncopied.

``mpi4py.util.pkl5`` sends the buffers of a pickle (protocol 5, PEP 574) beside its stream, which
saves a copy of every large array inside an object and has no size limit.
"""
from __future__ import annotations

import pickle
from typing import Any

from mpi4py import MPI


class Pickled:
    """An object that is pickled already.  Unpickling this gives the object.

    Pickling is where an object can be refused; this way it happens before the ranks agree.

    Raises:
        TypeError: If the object cannot be pickled.
    """

    def __init__(self, obj: Any) -> None:
        try:
            self.stream, self.buffers = MPI.pickle.dumps_oob(obj)
        except Exception as error:  # pickling runs code of the object
            raise TypeError(f'an object of {type(obj)} cannot be pickled: {error}') from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        return load, (pickle.PickleBuffer(self.stream),
                      [pickle.PickleBuffer(buffer) for buffer in self.buffers])  # type: ignore[arg-type]


def load(stream: Any, buffers: Any = ()) -> Any:
    """Unpickles an object from its stream and its buffers."""
    return pickle.loads(stream, buffers=buffers)
