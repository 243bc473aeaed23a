"""Lists of shards, and the index that :func:`write_shards` writes next to them."""
from __future__ import annotations

import fnmatch
import glob
import json
import os
import re
from collections.abc import Iterable, Sequence

from chainermn._process.atomic_file import open_atomic
from chainermn._shards.arrow_files import saved_files
from chainermn._types import Object

_FORMAT = 'chainermn shards 1'

#: The number of samples and the size in bytes of each shard, by path.
Index = dict[str, tuple[int, int]]


def find_shards(shards: Object, is_strict: bool = True) -> tuple[list[Object], Index]:
    """Return the shards, and their sizes from the indexes.

    Args:
        shards: A pattern, a folder of Hugging Face ``datasets``, or a sequence of shards.
        is_strict: Whether a missing shard is an error. Otherwise, the result includes it.

    Raises:
        FileNotFoundError: If no file matches, or if a matching shard that an index lists is
            missing.
        ValueError: If the sequence is empty, or an index is damaged.
    """
    if isinstance(shards, (os.PathLike, bytes)):
        shards = os.fsdecode(shards)
    if not isinstance(shards, str):
        found = [os.fsdecode(each) if isinstance(each, (os.PathLike, bytes)) else each
                 for each in shards]
        if not found:
            raise ValueError('the list of shards is empty')
        return found, _read_indexes(each for each in found if isinstance(each, str))
    if os.path.isdir(shards):
        return saved_files(shards), {}
    files = _matching(shards)
    if not files:
        hint = ''
        if '[' in shards:
            hint = '. Brackets are wildcards: escape them with glob.escape.'
        elif near := glob.glob(f'{glob.escape(shards)}-*'):
            extension = os.path.splitext(near[0])[1]
            hint = f'. To read the shards with this prefix, pass {f"{shards}-*{extension}"!r}.'
        raise FileNotFoundError(f'no file matches {shards!r} in the folder {os.getcwd()}{hint}')
    index = {path: size for path, size in _read_indexes(files).items() if _matches(shards, path)}
    if not is_strict:
        return sorted({*files, *index}), index
    if missing := sorted(set(index) - set(files)):
        more = f' and {len(missing) - 1} more shards are' if len(missing) > 1 else ' is'
        raise FileNotFoundError(
            f'{missing[0]}{more} listed in the index {_index_of(missing[0])}, but missing. Restore '
            'the files, or pass a list of the files to use.')
    return files, index


def write_index(prefix: str, shards: Sequence[tuple[str, int, int]]) -> None:
    """Write the index of shards.

    Args:
        prefix: Same as for :func:`write_shards`.
        shards: The path, the number of samples and the size in bytes of each shard.
    """
    with open_atomic(prefix + _SUFFIX) as file:
        file.write(json.dumps({'format': _FORMAT, 'shards': {
            os.path.basename(path): [samples, size] for path, samples, size in shards
        }}, indent=0).encode())


def remove_index(prefix: str) -> None:
    """Remove the index, if there is one."""
    if os.path.exists(prefix + _SUFFIX):
        os.remove(prefix + _SUFFIX)


def _matching(pattern: str) -> list[str]:
    """Return the files that a pattern matches. As in a shell, a pattern may be a file name."""
    found = {*glob.glob(pattern, recursive=True)}  # with two **, glob returns some files twice
    if os.path.basename(pattern) == '**':
        found = {path for path in found if not os.path.isdir(path)}
    if not found and os.path.isfile(pattern):
        found = {pattern}
    return sorted(found)


def _matches(pattern: str, path: str) -> bool:
    """Return whether a pattern that matches another file in the folder also matches a path."""
    name, last = os.path.basename(path), os.path.basename(pattern)
    if name.startswith('.') and not last.startswith('.'):
        return False
    return last == '**' or fnmatch.fnmatchcase(name, last) or path == pattern


_SUFFIX = '.index.json'


def _index_of(path: str) -> str | None:
    """Return the name of the index of a shard such as ``train-00003.npz``."""
    numbered = re.fullmatch(r'(.*)-\d+\.np[yz]', path, re.DOTALL)
    return numbered[1] + _SUFFIX if numbered else None


def _read_indexes(paths: Iterable[str]) -> Index:
    found: Index = {}
    for name in {*map(_index_of, paths)} - {None}:
        assert name is not None
        if not os.path.exists(name):
            continue
        try:
            with open(name, encoding='utf-8') as file:
                content = json.load(file)
            if content['format'] != _FORMAT:
                raise ValueError(f'unknown format {content["format"]!r}')
            folder = os.path.dirname(name)
            found.update({os.path.join(folder, shard): (int(samples), int(size))
                          for shard, (samples, size) in content['shards'].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'the index {name} is damaged: {error!r}. Delete it; the samples '
                             'are then counted again.') from error
    return found
