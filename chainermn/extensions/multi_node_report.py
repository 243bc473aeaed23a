"""create_multi_node_report: logs, plots and progress bars of all ranks, written by rank 0.

Chainer's reports are changed in place: logs and plots get means over the observations of all ranks,
and a progress bar counts the examples of all ranks.
"""
from __future__ import annotations

import functools
import math
from typing import TextIO, TypeVar

import chainer
from chainer.training import extensions
from chainer.training.extensions import progress_bar

from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._epoch_length import count_samples

_MEANS = extensions.LogReport, extensions.PlotReport
_WRITERS = extensions.PrintReport, extensions.ProgressBar


_R = TypeVar('_R', bound=chainer.training.Extension)


def create_multi_node_report(actual_report: _R, communicator: CommunicatorBase) -> _R:
    """Make a report extension show values for all ranks; only rank 0 writes them.

    Add the extension to the trainer on all ranks.

    - ``LogReport`` and ``PlotReport`` report means over the observations of all ranks since the
      last report; each observation counts once. Collective whenever their trigger fires, so the
      trigger must fire in the same iterations on all ranks. ``log`` is the same on all ranks; only
      rank 0 writes the files.
    - ``ProgressBar`` shows the examples per second of all ranks. Collective at the beginning of
      training, to count the examples in the datasets.
    - ``PrintReport`` and ``ProgressBar`` print on rank 0 only.

    Args:
        actual_report: One of these extensions of ``chainer.training.extensions``. It is changed in
            place.
        communicator: ChainerMN communicator of the ranks that have different examples.

    Returns:
        ``actual_report``.

    Raises:
        TypeError: On every rank, if ``actual_report`` is a different extension.

    Example:
        >>> from chainer.training import extensions
        >>> report = extensions.LogReport(trigger=(1, 'epoch'))
        >>> trainer.extend(chainermn.extensions.create_multi_node_report(report, comm))
        >>> trainer.run()
        >>> sorted(report.log[0])
        ['elapsed_time', 'epoch', 'iteration', 'main/accuracy', 'main/loss']
    """
    communicator = as_communicator(
        communicator, 'create_multi_node_report(actual_report, communicator)')
    if not isinstance(actual_report, (*_MEANS, *_WRITERS)):
        communicator.refuse('create_multi_node_report', TypeError(
            'create_multi_node_report needs a LogReport, PlotReport, PrintReport or ProgressBar of '
            f'chainer.training.extensions, not {actual_report!r}'))
    report, is_root = actual_report, communicator.rank == 0
    if isinstance(report, _MEANS):
        report._init_summary = functools.partial(
            _begin_summary, report, communicator, _public_name(report))
        report._init_summary()
    if isinstance(report, extensions.LogReport) and not is_root:
        report._log_name = None  # the name of the file
    elif isinstance(report, extensions.PlotReport) and not (is_root and report.available()):
        report.__class__ = _PlotWithoutFile
    elif isinstance(report, extensions.PrintReport) and not is_root:
        report._out = _NullFile()
    elif isinstance(report, extensions.ProgressBar):
        report._pbar = bar = _Bar(communicator, report._bar_length,
                                  report._out if is_root else _NullFile())
        bar.training_length = report._training_length
        report.initialize = bar.start
    return report


def _public_name(report: chainer.training.Extension) -> str:
    """Return the name of a report's class in Chainer or ChainerMN; ranks may use subclasses."""
    return next(kind.__name__ for kind in type(report).__mro__
                if kind.__module__.startswith(('chainer.', 'chainermn.')))


def _begin_summary(report: chainer.training.Extension, communicator: CommunicatorBase, name: str
                   ) -> None:
    report._summary = _Summary(communicator, name)


class _Summary(chainer.reporter.DictSummary):
    """Computes means over the values of all ranks."""

    def __init__(self, communicator: CommunicatorBase, caller: str) -> None:
        super().__init__()
        self._communicator = communicator
        self._caller = caller

    def compute_mean(self) -> dict[str, float]:
        """Return the means. Collective: every rank calls it."""
        mine = {name: (float(summary._x), float(summary._n))
                for name, summary in self._summaries.items()}
        totals: dict[str, tuple[float, float]] = {}
        with self._communicator.called_by(self._caller):
            by_rank = self._communicator.allgather_obj(mine)
        for theirs in by_rank:
            for name, (x, n) in theirs.items():
                total, count = totals.get(name, (0., 0.))
                totals[name] = total + x, count + n
        return {name: total / count for name, (total, count) in totals.items()}


class _PlotWithoutFile(extensions.PlotReport):
    """Computes the means of a plot that another rank draws."""

    default_name = 'PlotReport'

    @staticmethod
    def available() -> bool:
        """Return whether this rank writes a file."""
        return False

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        observation = trainer.observation
        self._summary.add({key: observation[key] for key in self._y_keys if key in observation})
        if trainer.is_before_training or self._trigger(trainer):
            self._summary.compute_mean()
            self._init_summary()


class _Bar(progress_bar._TrainerProgressBar):
    """A progress bar that also shows the examples per second of all ranks."""

    def __init__(self, communicator: CommunicatorBase, bar_length: int, out: TextIO | _NullFile
                 ) -> None:
        super().__init__(bar_length, out)
        self._communicator = communicator
        self._examples = 0  # examples of all ranks per epoch; 0 if unknown
        self._epochs_per_second = 0.

    def start(self, trainer: chainer.training.Trainer) -> None:
        """Count the examples of all ranks and start the clock. Collective: every rank calls it.

        Chainer's bar starts the clock when it is first drawn, so it would first show an infinite
        speed.
        """
        self._recent_timing.clear()
        self.update_speed(trainer.updater.iteration, trainer.updater.epoch_detail)
        with self._communicator.called_by('ProgressBar'):
            self._examples = count_samples(self._communicator, trainer)

    def update_speed(self, iteration: int, epoch_detail: float) -> tuple[float, float]:
        speeds = super().update_speed(iteration, epoch_detail)
        self._epochs_per_second = speeds[1]
        return speeds

    def get_lines(self) -> list[str]:
        lines = super().get_lines()
        if math.isinf(self._epochs_per_second):
            del lines[-1]  # no time has passed, so there is no speed and no estimate
        elif self._examples:
            size = self._communicator.size
            lines[-1] = (f'{self._epochs_per_second * self._examples:10.5g} examples/sec on '
                         f'{size} rank{"s" * (size > 1)}, {lines[-1].lstrip()}')
        return lines


class _NullFile:
    """A file that ignores all text."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
