"""Metrics in Prometheus' text format, in a file that is replaced as a whole."""
from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from chainermn._process.atomic_file import open_atomic


class Metric(NamedTuple):
    """A metric: its name without the prefix, its type, a sentence about it, and its values."""

    name: str
    kind: str  # 'counter' or 'gauge'
    help: str
    values: Iterable[tuple[Mapping[str, str], float]]  # with labels


def text(metrics: Iterable[Metric]) -> str:
    """Format metrics."""
    lines = []
    for metric in metrics:
        name = f'chainermn_{metric.name}'
        lines += [f'# HELP {name} {metric.help}', f'# TYPE {name} {metric.kind}']
        for labels, value in metric.values:
            inside = ','.join(f'{key}="{_escaped(each)}"' for key, each in labels.items())
            lines.append(f'{name}{{{inside}}} {value!r}')
    return '\n'.join(lines) + '\n'


def _escaped(value: str) -> str:
    value = value.encode(errors='replace').decode()
    return value.replace('\\', r'\\').replace('\n', r'\n').replace('"', r'\"')


class MetricsFile:
    """A file that others may read.

    Args:
        path: The file, in an existing folder.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def publish(self, metrics: Iterable[Metric]) -> None:
        """Replace the file.

        Raises:
            OSError: If this is not possible.
        """
        with open_atomic(str(self.path), sync=False) as file:
            file.write(text(metrics).encode())

    def close(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            self.path.unlink()
