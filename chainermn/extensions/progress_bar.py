"""ProgressBar: the progress of training on all ranks, printed by rank 0."""
from __future__ import annotations

import collections
import datetime
import sys
import time
from typing import NamedTuple, Protocol, TextIO

import chainer
from chainer.training.extensions import util

from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._calls import called_by
from chainermn.extensions._epoch_length import count_samples

_WINDOW = 20.  # seconds over which the speed is measured
_COLUMNS = 100


class ProgressBar(chainer.training.Extension):
    """Trainer extension that prints a progress bar for all ranks on rank 0.

    The bar shows the progress of training, the samples per second of all ranks together, and the
    remaining time. After a resume, the bar continues at the iteration of the checkpoint, and the
    speed is measured in the current run. The extension has no state to save. It uses tqdm if that
    is installed, otherwise Chainer's bar.

    Add the extension to the trainer on all ranks. Collective at the beginning of training, to count
    the samples of all ranks.

    Args:
        comm: ChainerMN communicator of the ranks that have different samples.
        training_length: Length of training, such as ``(20, 'epoch')``; by default, the length given
            by the trainer's stop trigger.
        interval: Minimum number of seconds between two updates of the bar.
        out: File to print to; ``sys.stderr`` by default.

    Example:
        >>> import io
        >>> trainer.extend(chainermn.extensions.ProgressBar(comm, out=io.StringIO()))
        >>> trainer.run()
    """

    trigger = 1, 'iteration'
    priority = chainer.training.PRIORITY_READER
    default_name = 'MultiNodeProgressBar'

    def __init__(self, comm: CommunicatorBase, *, training_length: tuple[float, str] | None = None,
                 interval: float = 1., out: TextIO | None = None) -> None:
        self.comm = as_communicator(comm, 'ProgressBar(comm)')
        self._training_length = training_length
        self._interval = interval
        self._out = sys.stderr if out is None else out
        self._samples = 0  # samples of all ranks per epoch; 0 if unknown
        self._points: collections.deque[_Point] = collections.deque()
        self._bar: _Display | None = None

    @called_by('ProgressBar')
    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Count the samples of all ranks. Collective: every rank calls it."""
        self._samples = count_samples(self.comm, trainer)
        self._points.clear()

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Draw the bar on rank 0 if the interval has passed."""
        if self.comm.rank:
            return
        length, unit = self._training_length or trainer.stop_trigger.get_training_length()
        epoch = trainer.updater.epoch_detail
        position = min(trainer.updater.iteration if unit == 'iteration' else epoch, length)
        self._current = _Point(time.monotonic(), epoch, position, length)
        # Create the bar at the first update, because extensions that load a snapshot are
        # initialized after this one.
        if self._bar is None:
            self._bar = _new_bar(length, unit, self._out)
            self._draw()
        elif self._current.at >= self._points[-1].at + self._interval:
            self._draw()

    def finalize(self) -> None:
        """Leave the last state of the bar on the screen."""
        if self._bar is not None:
            self._draw()
            self._bar.close()
            self._bar = None

    def _draw(self) -> None:
        assert self._bar is not None
        self._points.append(self._current)
        while len(self._points) > 2 and self._points[0].at < self._current.at - _WINDOW:
            self._points.popleft()
        self._bar.draw(self._current.position, self._speed())

    def _speed(self) -> str:
        """Return the speed and the time left as text; ``''`` if they are not known yet."""
        first, last = self._points[0], self._points[-1]
        seconds, progress = last.at - first.at, last.position - first.position
        if not seconds or not progress:
            return ''
        left = datetime.timedelta(seconds=round(seconds * (last.length - last.position) / progress))
        size = self.comm.size
        samples = self._samples * (last.epoch - first.epoch) / seconds
        return (f'{samples:.4g} samples/s on {size} rank{"s" * (size > 1)}, ' if samples else ''
                ) + f'{left} left'


class _Point(NamedTuple):
    """The progress at a point in time."""

    at: float  # seconds
    epoch: float
    position: float  # epochs or iterations, out of ``length``
    length: float


class _Display(Protocol):
    def draw(self, position: float, text: str) -> None:
        """Draw the bar."""

    def close(self) -> None:
        """Leave the last state on the screen."""


def _new_bar(length: float, unit: str, out: TextIO) -> _Display:
    try:
        return _TqdmBar(length, unit, out)
    except ImportError:
        return _ChainerBar(length, unit, out)


class _TqdmBar:
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


class _ChainerBar(util.ProgressBar):
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
        """Return the bar as text."""
        part = self._position / self._length if self._length else 1.
        marks = '#' * int(part * self._bar_length)
        return [f'{part:4.0%} [{marks:.<{self._bar_length}}] {self._position:.4g}/'
                f'{self._length:g} {self._unit}s{", " * bool(self._text)}{self._text}\n']
