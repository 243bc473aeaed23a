"""Prometheus' text format."""
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Metric(NamedTuple):
    """A metric: its name without the prefix, its type, a help text, and its values."""

    name: str
    kind: str  # 'counter' or 'gauge'
    help: str
    values: Iterable[tuple[Mapping[str, str], float]]  # with labels


def job_of(program: str) -> str:
    """Return the label ``job``: the job ID of Slurm, or the file name of the script."""
    return os.environ.get('SLURM_JOB_ID') or os.path.basename(program) or 'python'


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
    value = value.encode(errors='replace').decode().replace('\0', '')
    return value.replace('\\', r'\\').replace('\n', r'\n').replace('"', r'\"')
