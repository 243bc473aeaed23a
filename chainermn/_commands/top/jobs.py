"""Find the job to watch: by a process, by its name, or the only one on this host."""
from __future__ import annotations

import itertools
import os
import pwd
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from chainermn._commands import running_ranks


class Job(NamedTuple):
    """A job: its ranks on this host."""

    name: str  # the job ID of Slurm, or the file name of the program
    ranks: list[int]  # processes


class NoJobError(Exception):
    """There is no such job, or more than one."""


def find(target: str | None) -> Job:
    """Return a job of this user.

    Args:
        target: The process of a rank, of mpiexec, or of any other parent; a job ID of Slurm; the
            file name of the program; or ``None`` for the only job.

    Raises:
        NoJobError: If there is not exactly one such job.
    """
    if target is not None and target.isdecimal() and os.path.exists(f'/proc/{target}'):
        owner = os.stat(f'/proc/{target}').st_uid
        if owner != os.getuid():
            raise NoJobError(f'process {target} belongs to the user {_name_of(owner)}, and only '
                             'that user can watch it')
        jobs = _jobs(running_ranks.below(int(target)))
        missing = (f'process {target} and its children contain no rank that has created a '
                   'communicator')
    else:
        processes = (each for each in running_ranks.processes() if running_ranks.is_rank(each))
        jobs = [job for job in _jobs(processes) if target in (None, job.name)]
        missing = f'there is no job {target} of yours on this host' if target else (
            'no job of yours runs on this host')
        missing += ': it has finished, has no communicator yet, or runs on other hosts'
    if not jobs:
        raise NoJobError(missing)
    if len(jobs) > 1:
        raise NoJobError('several jobs of yours run on this host; select one by a PID:\n' + (
            '\n'.join(f'  {job.ranks[0]}  {job.name}, {len(job.ranks)} rank'
                      f'{"s" * (len(job.ranks) > 1)} on this host' for job in jobs)))
    return jobs[0]


def _jobs(processes: Iterable[int]) -> list[Job]:
    """Return the jobs of some ranks: those with the same launcher."""
    by_launcher: dict[int, list[int]] = {}
    for process in sorted(processes):
        by_launcher.setdefault(running_ranks.parent(process), []).append(process)
    return [Job(_job_name(ranks[0]), ranks) for ranks in by_launcher.values()]


def _job_name(process: int) -> str:
    return running_ranks.variable(process, 'SLURM_JOB_ID') or program(
        running_ranks.arguments(process))


def program(arguments: Sequence[str]) -> str:
    """Return the file name of the program in the command line of Python."""
    for previous, argument in itertools.pairwise(arguments):
        if argument == '-c' or previous in ('-W', '-X'):
            continue
        if previous == '-m' or not argument.startswith('-'):
            return os.path.basename(argument)
    return 'python'


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
