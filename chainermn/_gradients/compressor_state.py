"""The state of a compressor: the keys of its arrays, and their serialization."""
from __future__ import annotations

import ast
from collections.abc import Hashable, Mapping
from typing import TypeVar

import chainer
import numpy as np

from chainermn._types import Array, Serializer

_Key = TypeVar('_Key', bound=Hashable)


class Pieces(tuple[tuple[Hashable, int], ...]):
    """The key of arrays that are encoded together: the path and the size of each array."""


def serialize(serializer: Serializer, arrays: Mapping[_Key, Array], name: str
              ) -> dict[_Key, Array]:
    """Save or load arrays by key. Keys are strings, integers or tuples of these.

    Args:
        serializer: A Chainer serializer.
        arrays: The arrays to save.
        name: The prefix of the names of the arrays in the file, which is followed by a number. It
            differs between compressors.

    Returns:
        The saved or loaded arrays; empty if the file was saved without a compressor or with a
        different one.
    """
    if isinstance(serializer, chainer.serializer.Deserializer):
        try:
            keys = ast.literal_eval(bytes(serializer('keys', None)).decode())
            return {key: serializer(f'{name}{n}', None) for n, key in enumerate(keys)}
        except (KeyError, TypeError):  # no keys, or no arrays of these names
            return {}
    # Save the keys as bytes, because HDF5 cannot store NumPy arrays of text.
    serializer('keys', np.frombuffer(repr(list(arrays)).encode(), np.uint8))
    for n, array in enumerate(arrays.values()):
        serializer(f'{name}{n}', array)
    return dict(arrays)
