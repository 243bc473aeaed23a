"""Finds the arrays of a model in snapshots of models, trainers and ranks."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import chainer
import numpy as np

from chainer_compat.pytorch.conversion import state
from chainer_compat.pytorch.conversion.errors import ConversionError
from chainer_compat.pytorch.conversion.tracked_array import Array

#: The names of ChainerMN's checkpoint files: name, rank, iteration.
CHECKPOINT = re.compile(r'(?P<name>.+)\.(?P<rank>\d+)\.(?P<iteration>\d+)')

#: The array with the ID of the checkpoint and the ranks that wrote it, as JSON.
TAG = 'chainermn/save'


def load_snapshot(path: str | Path, model: chainer.Link, name: str = 'the model') -> str:
    """Load the parameters of a model from a snapshot that contains them.

    Args:
        path: An NPZ file of ``save_npz``, a trainer snapshot, a file of a ChainerMN checkpoint, or
            the folder of a checkpoint. For a folder, rank 0's file of the newest iteration that all
            ranks saved is loaded.
        model: An initialized model.
        name: Name of the model in error messages.

    Returns:
        The path of the model in the file, such as ``updater/model:main/``.

    Raises:
        ConversionError: If the file does not contain the model, contains several models, or
            contains a parameter or persistent value of another shape.

    Warns:
        UserWarning: For each newer iteration that was skipped because a file is missing or damaged.
    """
    path = files_of(Path(path))[0]
    with read(path) as arrays:
        prefix = find_model(arrays, model, str(path))
        expected = {**state.parameters(model), **state.persistent_values(model)}
        for key in sorted(arrays):  # their order in the file is random
            needed = expected.get(state.torch_name(key.removeprefix(prefix)))
            if needed is not None and key.startswith(prefix) and (
                    arrays[key].shape != needed.shape):
                raise ConversionError(f'{path}: {key} has shape {arrays[key].shape}, but {name} '
                                      f'needs {needed.shape}. Create the model with the '
                                      'same sizes as the one that was saved.')
        chainer.serializers.NpzDeserializer(arrays, path=prefix).load(model)
    return prefix


@contextlib.contextmanager
def read(path: str | Path) -> Iterator[Mapping[str, Array]]:
    """Open an NPZ file; raise ConversionError if the file is damaged or not an NPZ file."""
    if not zipfile.is_zipfile(path):
        with open(path, 'rb'):  # raises OSError if it cannot be read
            raise ConversionError(f'{path} is not an NPZ file. Pass a file written by '
                                  'chainer.serializers.save_npz, or by a snapshot or checkpoint.')
    try:
        with np.load(path) as arrays:
            yield arrays
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ConversionError(f'{path} is damaged: {type(error).__name__}: {error}. Pass a '
                              'different file.') from None


def files_of(path: Path) -> list[Path]:
    """Return the file itself; for a folder, return the files of the newest complete iteration."""
    return _newest_files(path) if path.is_dir() else [path]


def _newest_files(folder: Path) -> list[Path]:
    checkpoints: dict[tuple[str, int], dict[int, Path]] = {}
    for file in folder.iterdir():
        if match := CHECKPOINT.fullmatch(file.name):
            key = match['name'], int(match['iteration'])
            checkpoints.setdefault(key, {})[int(match['rank'])] = file
    if len({name for name, _ in checkpoints}) > 1:
        raise ConversionError(f'{folder} contains checkpoints with different names. Pass one of '
                              'the files.')
    ranks = max((max(files) + 1 for files in checkpoints.values()), default=0)
    for (_, iteration), files in sorted(checkpoints.items(), reverse=True):
        if _is_complete(files, ranks):
            return [files[rank] for rank in sorted(files)]
        warnings.warn(f'Skipped iteration {iteration} in {folder}: a file is missing or damaged.',
                      stacklevel=4)
    raise ConversionError(f'{folder} contains no iteration that all ranks saved. Pass a different '
                          'folder, or a single file.')


def _is_complete(files: Mapping[int, Path], ranks: int) -> bool:
    """Return whether all ranks saved an iteration.

    Args:
        files: The files of the iteration, by rank.
        ranks: Number of ranks, used only for files without a tag. Tagged files list their ranks,
            because a restart can change the number.
    """
    try:
        first = _tag(files[0])
        if first is None:
            return len(files) == ranks
        return all((_tag(files[rank]) or {}).get('save') == first['save']
                   for rank in first['writers'])
    except Exception:  # reading a damaged file can raise almost any exception
        return False


def _tag(file: Path) -> dict[str, Any] | None:
    """Return the checkpoint's ID and ranks from a file; ``None`` for a file of ChainerMN 7."""
    with np.load(file) as arrays:
        return json.loads(arrays[TAG].tobytes()) if TAG in arrays else None


def find_model(arrays: Mapping[str, Array], model: chainer.Link, file: str) -> str:
    """Return the prefix of the model's arrays.

    Raises:
        ConversionError: If there is no such prefix, or there are several.
    """
    paths = [path.lstrip('/') for path, _ in model.namedparams(include_uninit=True)]
    keys = set(arrays)
    prefixes = sorted({key[:len(key) - len(paths[0])] for key in keys if key.endswith(paths[0])})
    complete = [prefix for prefix in prefixes if prefix[-1:] in ('', '/') and all(
        prefix + path in keys for path in paths)]
    if not complete:
        first = next((path for path in paths if not any(
            key == path or key.endswith(f'/{path}') for key in keys)), paths[0])
        raise ConversionError(f'{file} does not contain all parameters of {type(model).__name__}, '
                              f'such as {first!r}. It contains: {", ".join(sorted(keys)[:8])}, ...')
    if len(complete) > 1:
        raise ConversionError(f'{file} contains several models: {", ".join(complete)}. Save a file '
                              'that contains only one of them.')
    return complete[0]
