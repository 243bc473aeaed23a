"""Warns if extensions of several ranks write to the same files or terminal."""
from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from chainer.training import Trainer, extensions
from chainer.training.extensions import _snapshot as chainer_snapshot

from chainermn._process import launcher, runtime
from chainermn._types import Object

_REPORT = ('Pass chainermn.extensions.create_multi_node_report({}(...), comm) to trainer.extend on '
           'all ranks; then only rank 0 writes{}.')
_MEANS = ' means over all ranks'
_SNAPSHOT = ('Pass chainermn.extensions.multi_node_snapshot(comm, snapshot(...)) to trainer.extend '
             'on all ranks, or use chainermn.create_multi_node_checkpointer.')
_OTHER = 'Add {} on rank 0 only, or include the rank in the file name.'


class _Output(NamedTuple):
    name: str  # name of the extension
    place: str  # path of the file, or 'the screen'
    advice: str
    key: object = None  # distinguishes different places with the same name


class _Warnings(runtime.ProcessState):
    """The outputs that this process has warned about."""

    def __init__(self) -> None:
        self.keys: set[str] = set()


def warn_about_shared_outputs(trainer: Trainer) -> None:
    """Warn on one of the ranks; the warning shows the line of the caller's caller."""
    if shared := [each for each in _outputs(trainer) if not _is_first(each)]:
        warnings.warn('\n'.join([
            'several ranks write to the same place and overwrite or mix their output',
            *(f'  {each.name}: {each.place}' for each in shared),
            *dict.fromkeys(each.advice for each in shared)]), stacklevel=3)


def _is_first(output: _Output) -> bool:
    """Return whether no other rank writes to an output, or whether a rank has already warned."""
    key, warned = f'{output.name} {output.key or output.place}', runtime.get(_Warnings).keys
    if key in warned or launcher.claim(f'output of {key}') or not launcher.claim(
            f'warning about {key}'):
        return True
    warned.add(key)
    return False


def _outputs(trainer: Trainer) -> Iterator[_Output]:
    """Find the places to which the extensions of a trainer write."""
    for entry in trainer._extensions.values():
        extension = entry.extension
        yield from _outputs_of(extension, trainer.out)
        if isinstance(log := getattr(extension, '_log_report', None), extensions.LogReport):
            yield from _outputs_of(log, trainer.out)


def _outputs_of(extension: Object, folder: str) -> Iterator[_Output]:
    name, file_name, advice = type(extension).__name__, None, ''
    if isinstance(extension, extensions.LogReport):
        file_name, advice = extension._log_name, _REPORT.format(name, _MEANS)
    elif isinstance(extension, extensions.PlotReport):
        if extension.available():
            file_name, advice = extension._file_name, _REPORT.format(name, _MEANS)
    elif isinstance(extension, extensions.VariableStatisticsPlot):
        if extension.available():
            file_name, advice = extension._filename, _OTHER.format(name)
    elif isinstance(extension, extensions.DumpGraph):
        file_name, advice = extension._filename, _OTHER.format(name)
    elif isinstance(extension, chainer_snapshot._Snapshot):
        if extension.condition is chainer_snapshot._always_true and not callable(
                extension.filename):
            name, file_name, advice = 'snapshot', extension.filename, _SNAPSHOT
    elif isinstance(extension, extensions.PrintReport):
        yield from _stream(name, extension._out)
    elif isinstance(extension, extensions.ProgressBar):
        yield from _stream(name, extension._pbar._out)
    if file_name is not None:
        yield _Output(name, os.path.abspath(os.path.join(folder, file_name)), advice)


def _stream(name: str, stream: Object) -> Iterator[_Output]:
    try:
        status = os.fstat(stream.fileno())
        if os.path.samestat(status, os.stat(os.devnull)):
            return
    except (AttributeError, OSError, ValueError):  # not a file, or a closed file
        return
    # The launcher reads from a pipe of each rank and writes everything to one screen.
    is_pipe = stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)
    place = stream.name if stat.S_ISREG(status.st_mode) else 'the screen'
    yield _Output(name, str(place), _REPORT.format(name, ''),
                  'pipe' if is_pipe else (status.st_dev, status.st_ino))
