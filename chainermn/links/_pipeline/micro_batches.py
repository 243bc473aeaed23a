"""Micro-batches: the arguments of a loss function for some of the examples of a batch."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import chainer

from chainermn._types import Object


def count(args: Object) -> int | None:
    """Return the number of examples in arguments, or ``None`` if there are no examples.

    Arrays and Variables have one example per row, lists one per element. Tuples and dicts contain
    further arguments.

    Raises:
        ValueError: If the arguments have different numbers of examples.
    """
    counts = [*_counts(args)]
    if len(set(counts)) > 1:
        raise ValueError('Pipeline: the arguments have different numbers of examples: '
                         + ', '.join(map(str, counts)))
    return counts[0] if counts else None


def bounds(n_examples: int, n_micro_batches: int) -> list[tuple[int, int]]:
    """Return the bounds of micro-batches. Their sizes differ by one at most; none is empty."""
    n = max(1, min(n_examples, n_micro_batches))
    ends = [n_examples * (k + 1) // n for k in range(n)]
    return [*zip([0, *ends[:-1]], ends, strict=True)]


def part(args: Object, begin: int, end: int) -> Object:
    """Return the arguments for the examples from ``begin`` to ``end``."""
    if isinstance(args, tuple):
        return tuple(part(each, begin, end) for each in args)
    if isinstance(args, Mapping):
        return {key: part(each, begin, end) for key, each in args.items()}
    return args[begin:end] if _has_examples(args) else args


def _counts(args: Object) -> Sequence[int]:
    if isinstance(args, Mapping):
        args = tuple(args.values())
    if isinstance(args, tuple):
        return [n for each in args for n in _counts(each)]
    return [len(args)] if _has_examples(args) else []


def _has_examples(x: Object) -> bool:
    kinds = chainer.Variable, *chainer.get_array_types()
    return isinstance(x, list) or (isinstance(x, kinds) and x.ndim > 0)
