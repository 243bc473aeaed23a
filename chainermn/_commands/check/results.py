"""Combine the results of all ranks into a report that people and programs can read."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from chainermn._commands.check.smoke_tests import Result
from chainermn._commands.check.system_info import Advice, Info, ProcessInfo

_T = TypeVar('_T')

#: Software that may differ between ranks.
_MAY_DIFFER = 'mpiexec', 'CUDA'

#: Seconds for an all-reduce of one number. Typical values are 1 to 50 us within a host, and 5 to
#: 300 us between hosts.
_HIGH_LATENCY = 500e-6


class Finding(NamedTuple):
    """A problem, a warning or a hint."""

    code: str
    subject: str  # the name of a software package, a host, or a communicator
    text: str


class HostResources(NamedTuple):
    """Ranks of one host that have the same resources."""

    name: str
    ranks: list[int]
    cores: int  # number of cores that each rank can use
    threads: int  # number of threads of each rank
    devices: list[str]


@dataclasses.dataclass
class Report:
    """The results of all ranks."""

    size: int
    software: dict[str, list[tuple[Info, list[int]]]]  # by name: each version and its ranks
    hosts: list[HostResources]
    communicators: list[Result]
    problems: list[Finding]  # failed required checks
    warnings: list[Finding]  # jobs run, but slowly
    hints: list[Finding]

    @classmethod
    def from_ranks(cls, infos: Sequence[ProcessInfo]) -> Report:
        """Combine the information of all ranks.

        Args:
            infos: The information of each rank, in rank order.
        """
        report = cls(len(infos), {}, [], [], [], list(_warnings(infos)), [])
        for name in infos[0].software:
            values = [info.software[name] for info in infos]
            report.software[name] = list(_groups(values))
            report.problems += _findings(name, [value.problem for value in values])
            report.hints += _findings(name, [value.hint for value in values])
            if name not in _MAY_DIFFER and len({value.text for value in values}) > 1:
                report.hints.append(Finding(
                    'differs', name,
                    f'{name} differs between ranks; install the same version on every node'))
        resources = [(info.host, len(info.cores), info.threads, info.devices) for info in infos]
        for (host, cores, threads, devices), ranks in _groups(resources):
            report.hosts.append(HostResources(host, ranks, cores, threads, devices))
        if report.size == 1 and not report.problems:
            report.hints.append(Finding(
                'one-rank', 'ranks', 'to test several ranks, run: '
                'mpiexec -n 4 chainermn check'))
        return report

    def add(self, results: Sequence[Result]) -> None:
        """Add the results of the smoke tests.

        Args:
            results: The result of each communicator.
        """
        has_devices = all(host.devices for host in self.hosts)
        for result in results:
            self.communicators.append(result)
            if not result.passed and (has_devices or not result.needs_gpu):
                self.problems.append(Finding(
                    'failed', result.name,
                    f'the communicator {result.name!r} failed: {result.error}'))
        latencies = [(result.latency, result.name) for result in results
                     if result.latency is not None and result.name != 'dummy']
        if latencies and min(latencies)[0] > _HIGH_LATENCY and not self.warnings:
            latency, name = min(latencies)
            self.warnings.append(Finding(
                'high-latency', name,
                f'high latency: an allreduce of one number takes {latency * 1e6:.0f} us with the '
                f'fastest communicator, {name!r}. Possible causes: other programs are running on '
                'these hosts, or the MPI library does not use the fast network of the cluster.'))

    def data(self) -> dict[str, object]:
        """Return the report as plain values for JSON, without the texts of the findings."""
        return {
            'passed': not self.problems,
            'size': self.size,
            'software': {name: [{**(info.data or {}), 'ranks': ranks} for info, ranks in groups]
                         for name, groups in self.software.items()},
            'hosts': [host._asdict() for host in self.hosts],
            'communicators': [{
                'name': result.name, 'passed': result.passed, 'error': result.error or None,
                'latency_us': result.latency and round(result.latency * 1e6, 1),
                'bandwidth_gb_s': result.bandwidth and round(result.bandwidth / 1e9, 2)}
                for result in self.communicators],
            **{name: [{'code': finding.code, 'subject': finding.subject} for finding in findings]
               for name, findings in (('problems', self.problems), ('warnings', self.warnings),
                                      ('hints', self.hints))},
        }


def _findings(name: str, advice: Sequence[Advice | None]) -> list[Finding]:
    return [Finding(each.code, name, each.text) for each in dict.fromkeys(advice) if each]


def _warnings(infos: Sequence[ProcessInfo]) -> Iterator[Finding]:
    """Compare the cores of each host with its ranks and threads."""
    for host in dict.fromkeys(info.host for info in infos):
        here = [info for info in infos if info.host == host]
        ranks = len(here)
        cores = len(frozenset().union(*(info.cores for info in here)))  # ranks may be bound
        threads = sum(info.threads for info in here)
        if ranks > cores:
            yield Finding('more-ranks-than-cores', host,
                          f'{ranks} ranks share {cores} cores on {host}, so they wait for each '
                          'other. Start at most one rank per core.')
        elif threads > cores:
            yield Finding('more-threads-than-cores', host,
                          f'{ranks} ranks with {threads} threads in total share {cores} cores on '
                          f'{host}. Set OMP_NUM_THREADS={cores // ranks}')


def _groups(values: Sequence[_T]) -> Iterator[tuple[_T, list[int]]]:
    """Group ranks by value. The values need not be hashable."""
    groups: dict[str, tuple[_T, list[int]]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(repr(value), (value, []))[1].append(rank)
    yield from groups.values()
