"""Loads what the ranks have chosen: each rank its own file, or all of them one."""
from __future__ import annotations

import io
import warnings
from typing import Any

import chainer
import numpy as np

from chainermn.extensions import _random_state
from chainermn.extensions._arrays import Arrays
from chainermn.extensions._choose import Choice
from chainermn.extensions._resized import Resized
from chainermn.extensions._saver import on_all_ranks


def load(comm: Any, choice: Choice, target: Any, allow_pickle: bool, group: Any = None) -> None:
    """Loads a save into an object.  Collective: every rank calls it.

    Call another collective operation afterwards: it raises an error of one rank on all others.

    Args:
        comm: ChainerMN communicator.
        choice: What :func:`~chainermn.extensions._choose.choose` returned.
        target: What to load into.
        allow_pickle: Whether arrays of Python objects are loaded.
        group: Communicator of the ranks whose first one reads for the others; if ``None``, each
            rank reads its own.
    """
    is_resized = choice.size not in (None, comm.size)
    if choice.is_for_all:
        group = comm
    name = choice.path or f'the file of iteration {choice.iteration}'
    source: Any = choice.path
    if group is not None:
        content, error = _read(name) if group.rank == 0 else (None, None)
        content = group.bcast(content)
        if error is not None:
            comm.refuse('loading', error)
        if not content.size:
            return  # the next operation raises that error
        source = io.BytesIO(content.data)
    with on_all_ranks(comm, 'loading'), Arrays(source, name, allow_pickle) as arrays:
        if is_resized:
            Resized(arrays, target).load(target)
        else:
            chainer.serializers.NpzDeserializer(arrays).load(target)
            _random_state.restore(arrays)
    if is_resized and comm.rank == 0:
        warnings.warn(_what_differs(comm, choice), RuntimeWarning, stacklevel=3)


def _read(path: str) -> tuple[Any, OSError | None]:
    try:
        with open(path, 'rb') as file:
            return np.frombuffer(file.read(), np.uint8), None
    except OSError as error:
        return np.empty(0, np.uint8), error


def _what_differs(comm: Any, choice: Choice) -> str:
    text = (f'iteration {choice.iteration} was saved by {choice.size} ranks and is loaded on '
            f'{comm.size}: iterators go on in the same part of the epoch in new orders, random '
            'numbers are not those of that run, and extensions take the state of one rank')
    if not choice.are_buffers_equal:
        text += ('; arrays of the model that are no parameters, such as averages of batch '
                 'normalization, differed between the ranks, and are those of one rank now')
    return text
