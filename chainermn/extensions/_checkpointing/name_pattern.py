"""File names of Chainer's snapshots: where they contain a number."""
from __future__ import annotations

import os
import re
import string
from collections.abc import Callable
from typing import NamedTuple


class NamePattern(NamedTuple):
    """A file name with at most one number, which is a whole one.

    >>> pattern = NamePattern.of('snapshot_{.updater.iteration:06}.npz')
    >>> pattern.file_name(500, 1)
    'snapshot_000500.npz.1'
    >>> NamePattern.of('latest').file_name(500, 1)
    'latest.1'
    """

    prefix: str
    spec: str | None  # the format of the number; None if there is none
    suffix: str

    @classmethod
    def of(cls, filename: str | Callable[..., str]) -> NamePattern | None:
        """Return the pattern of a file name; ``None`` if it has none."""
        if callable(filename):
            return None
        try:
            parts = [*string.Formatter().parse(filename)]
        except ValueError:  # no valid format
            return None
        fields = [i for i, (_, field, *_) in enumerate(parts) if field is not None]
        literals = [literal for literal, *_ in parts]
        if not fields:
            return cls(''.join(literals), None, '')
        _, field, spec, conversion = parts[fields[0]]
        is_whole = re.fullmatch(r'(0\d+)?d?', spec or '') and not (field or '').endswith('_detail')
        if len(fields) > 1 or conversion or not is_whole:
            return None
        end = fields[0] + 1
        pattern = cls(''.join(literals[:end]), spec, ''.join(literals[end:]))
        return None if os.path.dirname(pattern.suffix) else pattern

    def file_name(self, number: int | str, rank: int | str) -> str:
        """Return the name of the file of a rank."""
        text = '' if self.spec is None else number if isinstance(number, str) else format(
            number, self.spec)
        return f'{self.prefix}{text}{self.suffix}.{rank}'
