"""The metrics of the ranks of this host: what ``top`` shows, for Prometheus.

With ``CHAINERMN_METRICS``, the first rank of each host serves or writes them; see
``_process/metrics_target.py``.
"""
from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator

from chainermn._diagnostics.live_view import Sample
from chainermn._process import environment, metrics_target, streams
from chainermn._process.metrics_file import Metric, MetricsFile
from chainermn._process.mpi import MPI

#: How often to try a port again, which the last attempt of a job may not have closed yet.
_MAX_TRIES = 10


class MetricsViewer:
    """Publishes the samples of the ranks of this host.

    Args:
        file: Where to.
        host: The name of this host.
    """

    def __init__(self, file: MetricsFile, host: str) -> None:
        self.is_open, self.host, self._file = True, host, file

    def write(self, size: int, samples: Iterable[tuple[float, Sample]]) -> None:
        """Publish samples."""
        try:
            self._file.publish(_metrics(size, list(samples)))
        except OSError as error:  # such as a full disk; the program continues
            _warn(error)
            self.close()

    def close(self) -> None:
        """Remove the metrics."""
        self.is_open = False
        self._file.close()


class Opener:
    """Opens the target of the environment once, and warns if this is not possible."""

    def __init__(self) -> None:
        self._n_tries = 0 if environment.text(environment.METRICS) else _MAX_TRIES

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to open, or it was tried."""
        return self._n_tries >= _MAX_TRIES

    def cancel(self) -> None:
        """Note that another rank opens it."""
        self._n_tries = _MAX_TRIES

    def open(self) -> Iterator[MetricsViewer]:
        """Yield the viewer, or nothing if this is not possible (yet)."""
        self._n_tries += 1
        try:
            file = metrics_target.open_target(environment.text(environment.METRICS))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE and (
                    not self.is_done):
                return
            _warn(error)
        else:
            yield MetricsViewer(file, MPI.Get_processor_name())
        self.cancel()


def _warn(error: Exception) -> None:
    streams.write(f'chainermn: no metrics of {MPI.Get_processor_name()}: {environment.METRICS}='
                  f'{environment.text(environment.METRICS)}: {error}\n')


def _metrics(size: int, samples: list[tuple[float, Sample]]) -> Iterator[Metric]:
    every = [({'job': each.job, 'host': each.host, 'rank': str(each.rank)}, age, each)
             for age, each in samples]

    def metric(name: str, kind: str, text: str, value: Callable[[Sample], float | None]) -> Metric:
        return Metric(name, kind, text, [
            (labels, number) for labels, _, each in every if (number := value(each)) is not None])

    yield metric('updates_total', 'counter', 'Updates of the optimizer, including those before a '
                 'resume.', lambda each: each.updates)
    yield metric('operations_total', 'counter', 'Operations that need other ranks.',
                 lambda each: each.operations)
    yield Metric('activity_seconds_total', 'counter', 'Time of the main thread by activity.', [
        ({**labels, 'activity': name}, seconds) for labels, _, each in every
        for name, seconds in each.seconds.items()])
    yield metric('resident_memory_bytes', 'gauge', 'Resident memory of the process.',
                 lambda each: each.rss_bytes)
    yield metric('gpu_memory_pool_bytes', 'gauge', "Memory that CuPy's pool has allocated.",
                 lambda each: each.gpu_bytes)
    yield metric('blocked_seconds', 'gauge', 'For how long the main thread has been in its current '
                 'operation.', lambda each: each.state_seconds if each.is_waiting else 0.)
    yield Metric('last_sample_timestamp_seconds', 'gauge', 'Time of the last sample of the rank.', [
        (labels, time.time() - age) for labels, age, _ in every])
    yield Metric('ranks', 'gauge', 'Ranks of the job.', [
        ({'job': each.job, 'host': each.host}, size) for _, each in samples[:1]])
