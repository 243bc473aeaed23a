"""The metrics of ``chainermn run``: attempts, restarts, and the duration of failed attempts."""
from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence

from chainermn._commands.run.job_report import Attempt
from chainermn._process import metrics_process
from chainermn._process.prometheus import Metric, job_of, text


class RunMetrics:
    """Publishes the attempts of a job.

    Args:
        target: The target of ``--metrics``; ``None`` to publish nothing.
        program: The name of the script.

    Raises:
        OSError, subprocess.SubprocessError: If the process that publishes cannot be started.
    """

    def __init__(self, target: str | None, program: str) -> None:
        self._socket = metrics_process.start(target) if target else None
        self._started = time.time()
        self._labels = {'job': job_of(program), 'host': os.uname().nodename}

    def publish(self, attempts: Sequence[Attempt], is_running: bool) -> None:
        """Publish the current values.

        Args:
            attempts: The finished attempts.
            is_running: Whether another attempt is running.
        """
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the process has printed why it exited
                self._socket.send(text(self.metrics(attempts, is_running)).encode() + b'\0',
                                  socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Remove the metrics."""
        if self._socket is not None:
            self._socket.close()

    def metrics(self, attempts: Sequence[Attempt], is_running: bool) -> Iterator[Metric]:
        """Yield the metrics."""
        labels, failed = self._labels, [one for one in attempts if one.status]
        restarts = failed if is_running else failed[:-1]
        planned = sum(one.is_planned for one in restarts)
        ended = time.time() - self._started
        yield Metric('run_attempts_total', 'counter', 'Attempts that have started.',
                     [(labels, len(attempts) + is_running)])
        yield Metric('run_restarts_total', 'counter', 'Restarts after failures or to use more '
                     'hosts.', [({**labels, 'reason': 'failure'}, len(restarts) - planned),
                                ({**labels, 'reason': 'more_hosts'}, planned)])
        yield Metric('run_failed_attempt_seconds_total', 'counter', 'Duration of failed attempts, '
                     'including the time up to their last checkpoints, which is not lost.',
                     [(labels, sum(one.seconds for one in failed if not one.is_planned))])
        yield Metric('run_idle_seconds_total', 'counter', 'Time between attempts.', [
            (labels, max(0., ended - sum(one.seconds for one in attempts)))])
        yield Metric('run_attempt_running', 'gauge', 'Whether an attempt is running.',
                     [(labels, int(is_running))])
