"""The attempts of a job: the result of each attempt, and a table of all attempts."""
from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from chainermn._commands.run import hosts
from chainermn._commands.run.pool import Ending
from chainermn._process import streams

_MAX_MESSAGES = 3  # per attempt; one bug can cause failures on a thousand ranks


class Attempt(NamedTuple):
    """The result of one attempt."""

    started: float  # seconds since the epoch
    seconds: float
    status: int  # exit status of mpiexec, or 128 + signal number
    messages: list[str]  # from the ranks that failed, in chronological order
    ranks: Mapping[str, int]  # number of ranks on each host; empty without a hosts file
    ending: Ending | None  # why this command stopped the attempt

    @property
    def duration(self) -> str:
        minutes, seconds = divmod(round(self.seconds), 60)
        return f'{minutes // 60}:{minutes % 60:02}:{seconds:02}'

    @property
    def result(self) -> str:
        if self.status and self.ending is not None:
            return self.ending.reason
        return f'exit status {self.status}' if self.status else 'succeeded'

    @property
    def is_planned(self) -> bool:
        """Whether the job was stopped in order to restart it with more ranks."""
        return self.status != 0 and self.ending is not None and self.ending.is_planned


def say(text: str) -> None:
    """Print a message of this command on stderr."""
    streams.write(f'chainermn run: {text}\n')


def failure(attempts: Sequence[Attempt], max_restarts: int, startup: float) -> str | None:
    """Return why a job is not restarted after its last attempt; ``None`` if it is restarted.

    Args:
        attempts: All attempts.
        max_restarts: The maximum number of restarts after failures.
        startup: Give up if two consecutive attempts failed within this number of seconds.
    """
    if attempts[-1].is_planned:
        return None
    restarts = sum(not one.is_planned for one in attempts) - 1
    if restarts >= max_restarts:
        after = f' after {restarts_text(restarts)}' if restarts else ''
        return f'job failed{after}: the limit is --max-restarts {max_restarts}'
    if attempts[1:] and all(one.seconds < startup and not one.is_planned for one in attempts[-2:]):
        return (f'job failed: two consecutive attempts failed within {startup:g} seconds '
                '(--startup)')
    return None


def restarts_text(restarts: int) -> str:
    """Return a text such as ``2 restarts``."""
    return f'{restarts or "no"} restart{"s" * (restarts != 1)}'


def table(attempts: Sequence[Attempt]) -> Iterator[str]:
    """Yield the lines of the table, with the ranks on each host if the hosts are known."""
    has_hosts = any(one.ranks for one in attempts)
    column = f'{"ranks":<7}' if has_hosts else ''
    yield f'  {"attempt":<9}{"started":<21}{"duration":<10}{column}result'
    for number, one in enumerate(attempts, 1):
        started = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(one.started))
        column = f'{sum(one.ranks.values()):<7}' if has_hosts else ''
        yield f'  {number:<9}{started:<21}{one.duration:<10}{column}{one.result}'
        lines = [f'on {hosts.text(one.ranks)}'] if has_hosts else []
        if not one.is_planned:
            lines += one.messages[:_MAX_MESSAGES]
            if len(one.messages) > _MAX_MESSAGES:
                lines.append(f'and {len(one.messages) - _MAX_MESSAGES} more')
        yield from (f'{"":<{49 if has_hosts else 42}}{line}' for line in lines)
