"""ProgressBar: the progress of the training on all ranks, printed by rank 0."""
from __future__ import annotations

import collections
import datetime
import importlib.util
import sys
import time
from typing import Literal, Protocol, TextIO

import chainer
from chainer.training.extensions import util

from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.errors import raise_on_all_ranks
from chainermn.extensions._calls import called_by

_WINDOW = 20.  # seconds, for the speed
_COLUMNS = 100

Style = Literal['tqdm', 'rich', 'chainer']


class ProgressBar(chainer.training.Extension):
    """Trainer extension that prints a progress bar for all ranks on rank 0.

    It shows the part of the training that is done, the samples per second of all ranks together,
    and the time left.  After a resume, it continues at the iteration of the checkpoint, and the
    speed is that of the current run.  It needs no checkpoint of its own.

    Add it to the trainer on all ranks.  Collective when it is created, and at the beginning of the
    training, to add up the data sets.

    Args:
        comm: ChainerMN communicator of the ranks that have different samples.
        training_length: Such as ``(20, 'epoch')``; by default that of the trainer's stop trigger.
        interval: Minimum number of seconds between two updates of the bar.
        style: ``'tqdm'``, ``'rich'``, or ``'chainer'``, which needs no other package.  By default,
            tqdm if it is installed on rank 0, else rich if it is installed and ``out`` is a
            terminal.  Under mpiexec, ``out`` is usually not a terminal.
        out: Where to print; ``sys.stderr`` by default.

    Raises:
        ImportError: On all ranks, if ``style`` is not installed on rank 0.
        ValueError: On all ranks, if there is no such style.

    Example:
        >>> import io
        >>> trainer.extend(chainermn.extensions.ProgressBar(comm, out=io.StringIO()))
        >>> trainer.run()
    """

    trigger = 1, 'iteration'
    priority = chainer.training.PRIORITY_READER
    default_name = 'MultiNodeProgressBar'

    def __init__(self, comm: CommunicatorBase, *, training_length: tuple[float, str] | None = None,
                 interval: float = 1., style: Style | None = None, out: TextIO | None = None
                 ) -> None:
        self.comm = as_communicator(comm, 'ProgressBar')
        self._training_length = training_length
        self._interval = interval
        self._out = sys.stderr if out is None else out
        with self.comm.called_by('ProgressBar'):
            with raise_on_all_ranks(self.comm, 'ProgressBar'):
                selected = _installed(style, self._out) if self.comm.rank == 0 else ''
            self._style = self.comm.bcast_obj(selected)  # where the other ranks get an error
        self._samples = 0  # of all ranks in an epoch; 0 if unknown
        self._recent: collections.deque[tuple[float, float, float]] = collections.deque()
        self._bar: _Bar | None = None
        self._drawn_at = 0.

    @called_by('ProgressBar')
    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Add up the data sets of all ranks.  Collective: every rank calls it."""
        try:
            samples = len(trainer.updater.get_iterator('main').dataset)
        except Exception:  # an updater or iterator of another kind
            samples = 0
        by_rank = self.comm.allgather_obj(samples)
        self._samples = sum(by_rank) if all(by_rank) else 0
        self._recent.clear()

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Draw the bar on rank 0, if it is time."""
        now = time.monotonic()
        if self.comm.rank or (self._recent and now < self._drawn_at + self._interval):
            return
        self._drawn_at = now
        length, unit = self._training_length or trainer.stop_trigger.get_training_length()
        epoch = trainer.updater.epoch_detail
        position = min(trainer.updater.iteration if unit == 'iteration' else epoch, length)
        # Not before: extensions that load a snapshot are initialized after this one.
        if self._bar is None:
            self._bar = _BARS[self._style](length, unit, self._out)
        self._recent.append((now, epoch, position))
        while len(self._recent) > 2 and self._recent[0][0] < now - _WINDOW:
            self._recent.popleft()
        self._bar.draw(position, self._speed(length))

    def finalize(self) -> None:
        """Leave the last state of the bar on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _speed(self, length: float) -> str:
        """Return the speed and the time left, in words; '' if they are not known yet."""
        (begin, epoch_before, before), (now, epoch, position) = self._recent[0], self._recent[-1]
        seconds = now - begin
        if not seconds or position == before:
            return ''
        left = datetime.timedelta(seconds=round(seconds * (length - position) / (
            position - before)))
        size = self.comm.size
        samples = self._samples * (epoch - epoch_before) / seconds
        return (f'{samples:.4g} samples/s on {size} rank{"s" * (size > 1)}, ' if samples else ''
                ) + f'{left} left'


class _Bar(Protocol):
    def __init__(self, length: float, unit: str, out: TextIO) -> None: ...

    def draw(self, position: float, text: str) -> None:
        """Draw the bar."""

    def close(self) -> None:
        """Leave the last state on the screen."""


class _Tqdm:
    def __init__(self, length: float, unit: str, out: TextIO) -> None:
        import tqdm

        columns = None if out.isatty() else _COLUMNS
        self._bar = tqdm.tqdm(
            total=length, file=out, mininterval=0, ncols=columns, dynamic_ncols=columns is None,
            bar_format=f'{{percentage:3.0f}}%|{{bar}}| {{n:.4g}}/{{total:g}} {unit}s{{postfix}}')

    def draw(self, position: float, text: str) -> None:
        self._bar.n = position
        self._bar.set_postfix_str(text)

    def close(self) -> None:
        self._bar.close()


class _Rich:
    def __init__(self, length: float, unit: str, out: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn('{task.percentage:3.0f}%'), BarColumn(None),
            TextColumn(f'{{task.completed:.4g}}/{{task.total:g}} {unit}s'),
            TextColumn('{task.description}'), console=Console(file=out), auto_refresh=False,
            expand=True)
        self._task = self._bar.add_task('', total=length)

    def draw(self, position: float, text: str) -> None:
        self._bar.update(self._task, completed=position, description=text)
        self._bar.start()
        self._bar.refresh()

    def close(self) -> None:
        self._bar.stop()


class _Chainer(util.ProgressBar):
    """Draws with Chainer's class, which writes control characters for terminals."""

    def __init__(self, length: float, unit: str, out: TextIO) -> None:
        super().__init__(out=out)
        self._length, self._unit = length, unit

    def draw(self, position: float, text: str) -> None:
        self._position, self._text = position, text
        self.update()

    def close(self) -> None:
        self.erase_console()
        self._out.writelines(self.get_lines())
        self.flush()

    def get_lines(self) -> list[str]:
        """Return the bar, as text."""
        part = self._position / self._length if self._length else 1.
        marks = '#' * int(part * self._bar_length)
        return [f'{part:4.0%} [{marks:.<{self._bar_length}}] {self._position:.4g}/'
                f'{self._length:g} {self._unit}s{", " * bool(self._text)}{self._text}\n']


_BARS: dict[str, type[_Bar]] = {'tqdm': _Tqdm, 'rich': _Rich, 'chainer': _Chainer}


def _installed(style: Style | None, out: TextIO) -> str:
    """Return the style to use.

    Raises:
        ImportError: If the package of ``style`` is not installed.
        ValueError: If there is no such style.
    """
    if style is None:
        if importlib.util.find_spec('tqdm'):
            return 'tqdm'
        return 'rich' if importlib.util.find_spec('rich') and out.isatty() else 'chainer'
    if style not in _BARS:
        raise ValueError(f'style must be one of {", ".join(map(repr, _BARS))}, or None, not '
                         f'{style!r}')
    if style != 'chainer' and not importlib.util.find_spec(style):
        raise ImportError(f'{style} is not installed. Install it on rank 0: pip install {style}')
    return style
