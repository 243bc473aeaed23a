"""Snapshots of models, trainers and ranks: which arrays belong to the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import chainer
import numpy as np

from chainer_compat.conversion.errors import ConversionError
from chainer_compat.conversion.tracked_array import Array

#: The files of ChainerMN's checkpoints: name, rank, iteration.
CHECKPOINT = re.compile(r'(?P<name>.+)\.(?P<rank>\d+)\.(?P<iteration>\d+)')


def load_snapshot(path: str | Path, model: chainer.Link) -> str:
    """Load the parameters of a model from a snapshot that contains them.

    Args:
        path: An NPZ file of ``save_npz``, a trainer snapshot, a file of a ChainerMN checkpoint, or
            its folder: then rank 0's file of the newest iteration that all ranks saved.
        model: An initialized model.

    Returns:
        Where in the file the model was, such as ``updater/model:main/``.

    Raises:
        ConversionError: If the file does not contain the model, or several.
    """
    path = Path(path)
    if path.is_dir():
        path = newest_file(path)
    with np.load(path) as arrays:
        prefix = find_model(arrays, model, str(path))
        chainer.serializers.NpzDeserializer(arrays, path=prefix).load(model)
    return prefix


def newest_file(folder: Path) -> Path:
    """Return rank 0's file of the newest iteration that all ranks saved."""
    saves: dict[tuple[str, int], dict[int, Path]] = {}
    for file in folder.iterdir():
        if match := CHECKPOINT.fullmatch(file.name):
            key = match['name'], int(match['iteration'])
            saves.setdefault(key, {})[int(match['rank'])] = file
    if len({name for name, _ in saves}) > 1:
        raise ConversionError(f'{folder} contains checkpoints with different names. Pass a file.')
    ranks = max((max(files) + 1 for files in saves.values()), default=0)
    complete = [iteration for (_, iteration), files in saves.items() if len(files) == ranks]
    if not complete:
        raise ConversionError(f'{folder} contains no iteration that all ranks saved.')
    (name,) = {name for name, _ in saves}
    return saves[name, max(complete)][0]


def find_model(arrays: Mapping[str, Array], model: chainer.Link, file: str) -> str:
    """Return the prefix of the model's arrays.

    Raises:
        ConversionError: If there is no such prefix, or several.
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
        raise ConversionError(f'{file} contains several models: {", ".join(complete)}.')
    return complete[0]
