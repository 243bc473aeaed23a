"""Files with the states of a store's optimizer: arrays and plain data, nothing that is run."""
from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from chainermn.kvstore._layout import Key, Layout

_FORMAT = 1


def whole(layout: Layout, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Puts the states of one key together from those of the servers that have parts of it.

    What is no array of the shape of the part, such as the number of steps, is that of the first.
    """
    first = min(parts)
    found = dict(parts[first])
    for name, value in found.items():
        if not layout.is_cut or getattr(value, 'shape', None) != layout.part_shape(first):
            continue
        found[name] = np.zeros(layout.shape, value.dtype)
        for server in layout.parts:
            if server in parts:
                layout.part(found[name], server)[...] = parts[server][name]
    return found


def write(path: str | os.PathLike[str], states: Mapping[Key, Mapping[str, Any]],
          optimizer: Mapping[str, Any] | None) -> None:
    """Writes states to a file that is whole whenever it is there.

    Args:
        path: Path of the file, an npz file.
        states: States by name, by key.
        optimizer: Class and hyperparameters, or ``None``.
    """
    about = {'format': _FORMAT, 'keys': list(states), 'optimizer': optimizer}
    arrays = {'about': np.array(json.dumps(about))}
    for i, of_key in enumerate(states.values()):
        for name, value in of_key.items():
            arrays[f'{i}/{name}'] = np.asarray(value)
            if arrays[f'{i}/{name}'].dtype.hasobject:
                raise TypeError(f'the state {name!r} of a key is {value!r}, which is no array')
    path = os.fspath(path)
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f'tmp-{name}-{os.getpid()}')
    try:
        with open(temporary, 'xb') as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        if isinstance(error, OSError) and error.filename:
            error.filename = path
        raise


def read(path: str | os.PathLike[str]) -> tuple[dict[Key, dict[str, Any]], dict[str, Any] | None]:
    """Reads what :func:`write` has written; runs no code of the file.

    Returns:
        States by name, by key, and class and hyperparameters or ``None``.

    Raises:
        ValueError: If the file is damaged or is something else.
        OSError: If it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file['about']))
            if about['format'] != _FORMAT:
                raise ValueError(f'its format is {about["format"]}, not {_FORMAT}')
            states: dict[Key, dict[str, Any]] = {key: {} for key in about['keys']}
            for name in file.files:
                number, slash, state = name.partition('/')
                if slash:
                    states[about['keys'][int(number)]][state] = file[name]
            return states, about['optimizer']
    except OSError:
        raise
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError,
            zipfile.BadZipFile) as error:
        # NumPy advises to load what it does not know without care.
        reason = 'it is no NPZ file' if 'allow_pickle' in str(error) else error
        raise ValueError(f'{os.fspath(path)} has no states of a KVStore: {reason}') from error
