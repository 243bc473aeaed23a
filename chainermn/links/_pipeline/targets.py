"""Detects ranks that pass the targets of different batches."""
from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from typing import TypeAlias

import chainer
import numpy as np

from chainermn._operations.ranks import group_ranks, ranks_text
from chainermn._process.program_place import program_place
from chainermn._types import Object

#: Number of batches that are compared, starting with the first one.
N_COMPARED = 3

#: Shape and dtype of a target, and a digest of its elements.
Digest: TypeAlias = tuple[tuple[int, ...], str, int]


def digest(target: Object) -> Digest | None:
    """Return the digest of a target.

    Returns:
        The digest, or ``None`` if the target is not an array or if all its elements are identical,
        because such an array may be a placeholder on a rank that does not use the target.
    """
    x = target.array if isinstance(target, chainer.Variable) else target
    if not isinstance(x, chainer.get_array_types()):
        return None
    x = np.ascontiguousarray(chainer.backends.cuda.to_cpu(x))
    if x.size == 0 or (x == x.ravel()[0]).all():
        return None
    return x.shape, x.dtype.str, zlib.crc32(x.view(np.uint8).data)


def warn_of_differences(digests: Sequence[Digest | None]) -> bool:
    """Warn if ranks have passed different targets of the same shape and dtype.

    Args:
        digests: The digest of each rank's target.

    Returns:
        Whether this function warned.
    """
    known = [(rank, each) for rank, each in enumerate(digests) if each is not None]
    groups = group_ranks(known)
    if len({each[:2] for _, each in known}) != 1 or len(groups) < 2:
        return False
    path, line = program_place()
    warnings.warn_explicit(
        'Pipeline: ' + ' and '.join(map(ranks_text, groups.values())) + ' passed different '
        'targets, so some of them do not match the inputs of the first stage. To give all ranks '
        'the same batches, use chainermn.iterators.create_synchronized_iterator or '
        'create_multi_node_iterator. Pass None for a target that a rank does not use.',
        RuntimeWarning, path, line)
    return True
