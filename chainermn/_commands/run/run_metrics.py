"""The metrics of ``chainermn run``: attempts, restarts, and the time of failed attempts."""
from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from chainermn._commands.run.job_report import Attempt, say
from chainermn._process import metrics_target
from chainermn._process.metrics_file import Metric, MetricsFile


class RunMetrics:
    """Publishes the attempts of a job.

    Args:
        target: Where to, ``None`` for nowhere.
        program: The name of the program.

    Raises:
        OSError: If the port is in use, or the folder does not exist.
        ValueError: If the target is neither a port nor a file.
    """

    def __init__(self, target: str | None, program: str) -> None:
        self._file: MetricsFile | None = metrics_target.open_target(target) if target else None
        self._started = time.time()
        self._labels = {'job': os.environ.get('SLURM_JOB_ID') or os.path.basename(program),
                        'host': os.uname().nodename}

    def publish(self, attempts: Sequence[Attempt], is_running: bool) -> None:
        """Publish the current numbers.

        Args:
            attempts: The attempts that have ended.
            is_running: Whether another one runs.
        """
        if self._file is not None:
            try:
                self._file.publish(self._metrics(attempts, is_running))
            except OSError as error:
                say(f'no more metrics: {error}')
                self.close()

    def close(self) -> None:
        """Remove the metrics."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _metrics(self, attempts: Sequence[Attempt], is_running: bool) -> Iterator[Metric]:
        labels, failed = self._labels, [one for one in attempts if one.status]
        restarts = failed if is_running else failed[:-1]
        planned = sum(one.is_planned for one in restarts)
        ended = time.time() - self._started
        yield Metric('run_attempts_total', 'counter', 'Attempts that have started.',
                     [(labels, len(attempts) + is_running)])
        yield Metric('run_restarts_total', 'counter', 'Restarts after failures, and to use more '
                     'hosts.', [({**labels, 'reason': 'failure'}, len(restarts) - planned),
                                ({**labels, 'reason': 'more_hosts'}, planned)])
        yield Metric('run_failed_attempt_seconds_total', 'counter', 'Duration of failed attempts, '
                     'including the time up to their last checkpoints, which is not lost.',
                     [(labels, sum(one.seconds for one in failed if not one.is_planned))])
        yield Metric('run_idle_seconds_total', 'counter', 'Time between attempts.', [
            (labels, max(0., ended - sum(one.seconds for one in attempts)))])
        yield Metric('run_attempt_running', 'gauge', 'Whether an attempt runs.',
                     [(labels, int(is_running))])
