"""Find the job to watch: by a process ID, by its name, or the only job on this host."""
from __future__ import annotations

import contextlib
import os
import pathlib
import pwd
from collections.abc import Sequence
from typing import NamedTuple

from chainermn._commands import running_ranks
from chainermn._operations.exceptions import ChainerMNError
from chainermn._process import streams


class RunningJob(NamedTuple):
    """A job and its ranks on this host."""

    name: str  # the Slurm job ID, or the file name of the script
    ranks: list[int]  # process IDs


class NoJobError(ChainerMNError, LookupError):
    """There is no such job, or more than one."""


def find(target: str | None) -> RunningJob:
    """Return a job of this user.

    Args:
        target: A Slurm job ID; the file name or path of the script; the process ID of a rank, of
            mpiexec, or of any other parent; or ``None`` for the only job.

    Raises:
        NoJobError: If there is not exactly one such job.
    """
    jobs = every = _jobs()
    missing = 'found no job of yours on this host'
    if target is not None:
        name = streams.printable(os.path.basename(target) or target)
        jobs = [job for job in every if job.name == name]
        missing = f'found no job {name} of yours on this host'
    missing += ('. It may have finished, have created no communicator yet, or run on other hosts '
                'only')
    if not jobs and target is not None and target.isdecimal() and os.path.exists(f'/proc/{target}'):
        owner = os.stat(f'/proc/{target}').st_uid
        if owner != os.getuid():
            raise NoJobError(f'process {target} belongs to user {_name_of(owner)}, and only '
                             'that user can watch it')
        jobs = below(int(target))
        missing = (f'neither process {target} nor any of its children is a rank that has created a '
                   'communicator')
        if len(jobs) > 1:
            raise NoJobError(f'several jobs run under process {target}; select one by its PID:\n'
                             f'{text(jobs)}')
    if not jobs:
        raise NoJobError(missing)
    if len(jobs) > 1:
        raise NoJobError(
            f'you have several jobs on this host; select one by its PID:\n{text(jobs)}')
    return jobs[0]


def below(process: int) -> list[RunningJob]:
    """Return the jobs of this user that run under a process.

    Args:
        process: The process ID of a rank, of mpiexec, or of any other parent.
    """
    ranks = set(running_ranks.below(process))
    return [job for job in _jobs() if ranks & set(job.ranks)]


def text(jobs: Sequence[RunningJob]) -> str:
    """Return a list of jobs as text: one line for each, with the process ID of a rank."""
    return '\n'.join(f'  {job.ranks[0]}  {job.name}, {len(job.ranks)} rank'
                     f'{"s" * (len(job.ranks) > 1)} on this host' for job in jobs)


def _jobs() -> list[RunningJob]:
    """Return the jobs of this user on this host."""
    ranks: dict[str, list[int]] = {}
    for process in sorted(running_ranks.processes()):
        if (job := running_ranks.job(process)) is not None:
            ranks.setdefault(job, []).append(process)
    return [RunningJob(_name(each[0]), each) for each in ranks.values()]


def _name(process: int) -> str:
    """Return the name of a job, from the environment and the command line of a rank."""
    for line in _strings(process, 'environ'):
        if line.startswith('SLURM_JOB_ID='):
            return streams.printable(line.partition('=')[2])
    return streams.printable(program(_strings(process, 'cmdline')))


def _strings(process: int, name: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.fsdecode(pathlib.Path(f'/proc/{process}/{name}').read_bytes()).split('\0')[:-1]
    return []


def program(arguments: Sequence[str]) -> str:
    """Return the file name of the script in a Python command line."""
    rest = iter(arguments[1:])
    for argument in rest:
        if not argument.startswith('-'):
            return os.path.basename(argument)
        if argument.startswith('--'):
            continue
        for end, option in enumerate(argument[1:], 2):
            if option == 'c':
                return 'python -c'
            if option == 'm':
                return argument[end:] or next(rest, 'python')
            if option in 'WX':
                if not argument[end:]:
                    next(rest, None)
                break
    return 'python'


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
