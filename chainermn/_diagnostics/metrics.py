"""The metrics of the ranks on this host: the values that ``top`` shows, for Prometheus.

With ``CHAINERMN_METRICS``, the first rank of each host publishes them through a separate process;
see ``_process/metrics_server.py``.
"""
from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from chainermn._diagnostics.live_view import Sample, Viewer
from chainermn._process import environment, metrics_process, streams
from chainermn._process.prometheus import Metric, job_of, text
from chainermn._version import __version__


def open_viewer(target: str) -> Viewer | None:
    """Return a viewer that publishes samples; on failure, print a warning and return ``None``."""
    try:
        return Viewer(metrics_process.start(target), _page, is_local=True)
    except ValueError as error:
        problem = f'{environment.METRICS} {error}'
    except (OSError, subprocess.SubprocessError) as error:
        problem = str(error)
    streams.write(f'chainermn: cannot publish metrics of {os.uname().nodename}: {problem}\n')
    return None


def _page(size: int, samples: Sequence[tuple[float, Sample]]) -> bytes:
    return text(metrics(size, samples)).encode() + b'\0'


def metrics(size: int, samples: Sequence[tuple[float, Sample]]) -> Iterator[Metric]:
    """Yield the metrics.

    Args:
        size: The number of ranks of the job.
        samples: The newest sample of each rank on this host, with its age in seconds.
    """
    job = job_of(sys.argv[0])
    every = [({'job': job, 'host': each.host, 'rank': str(each.rank)}, age, each)
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
    yield metric('cpu_seconds_total', 'counter', 'CPU time of the process.',
                 lambda each: each.cpu_seconds)
    yield metric('resident_memory_bytes', 'gauge', 'Resident memory of the process.',
                 lambda each: each.rss_bytes)
    yield metric('gpu_memory_pool_bytes', 'gauge', "Memory that CuPy's pool has allocated.",
                 lambda each: each.gpu_bytes)
    yield metric('gpu_utilization_ratio', 'gauge', 'Share of time in which the GPU is busy, from '
                 'NVML.', lambda each: each.gpu and each.gpu.utilization)
    yield metric('gpu_memory_used_bytes', 'gauge', 'GPU memory used by all processes, from NVML.',
                 lambda each: each.gpu and each.gpu.used_bytes)
    yield metric('gpu_memory_total_bytes', 'gauge', 'Total GPU memory, from NVML.',
                 lambda each: each.gpu and each.gpu.total_bytes)
    yield Metric('log_value', 'gauge', 'Newest entry of LogReport.', [
        ({**labels, 'key': name}, value) for labels, _, each in every
        for name, value in each.log.items()])
    yield metric('blocked_seconds', 'gauge', 'How long the main thread has been in its current '
                 'operation.', lambda each: each.state_seconds if each.is_waiting else 0.)
    yield Metric('last_sample_timestamp_seconds', 'gauge', 'Time of the last sample of the rank.', [
        (labels, time.time() - age) for labels, age, _ in every])
    host = [{'job': job, 'host': each.host} for _, each in samples[:1]]
    yield Metric('ranks', 'gauge', 'Ranks of the job.', [(labels, size) for labels in host])
    yield Metric('build_info', 'gauge', 'Version of ChainerMN; always 1.', [
        ({**labels, 'version': __version__}, 1) for labels in host])
