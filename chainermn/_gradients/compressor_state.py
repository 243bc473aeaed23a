"""The state of a compressor: what its arrays belong to, and how they are saved."""
from __future__ import annotations

import ast
from collections.abc import Hashable, Mapping
from typing import TypeVar

import chainer
import numpy as np

from chainermn._types import Array, Serializer

_Key = TypeVar('_Key', bound=Hashable)


class Pieces(tuple[tuple[Hashable, int], ...]):
    """A key of arrays that are encoded side by side: the path and the size of each."""


def serialize(serializer: Serializer, arrays: Mapping[_Key, Array], name: str
              ) -> dict[_Key, Array]:
    """Save or load arrays by key; keys are strings, integers or tuples of these.

    Args:
        serializer: A serializer of Chainer.
        arrays: The arrays to save.
        name: The name of an array in the file, followed by its number; differs between compressors.

    Returns:
        The saved or loaded arrays; none if the file was saved without a compressor, or by another
        one.
    """
    if isinstance(serializer, chainer.serializer.Deserializer):
        try:
            keys = ast.literal_eval(bytes(serializer('keys', None)).decode())
            return {key: serializer(f'{name}{n}', None) for n, key in enumerate(keys)}
        except (KeyError, TypeError):  # there are no keys, or arrays of these names
            return {}
    # Save the keys as bytes, because HDF5 has no arrays of text.
    serializer('keys', np.frombuffer(repr(list(arrays)).encode(), np.uint8))
    for n, array in enumerate(arrays.values()):
        serializer(f'{name}{n}', array)
    return dict(arrays)
