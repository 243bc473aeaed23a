"""The pool of hosts. Reachable hosts run the ranks; lost hosts are used again once reachable."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from chainermn._commands.run import hosts
from chainermn._commands.run.job_links import Links
from chainermn._commands.run.probe import Probe
from chainermn._process.running_time import RunningClock

# Seconds.
_POLL_INTERVAL = 0.05
_PROBE_INTERVAL, _PER_HOST = 5, 1  # between probes; longer for many hosts, to limit the load
_LOST_AFTER = 120  # without a sign of life from a host, before the job is stopped


class Ending(NamedTuple):
    """Why this command stops a job."""

    reason: str
    is_planned: bool  # whether the job is stopped to restart it with more ranks


class Pool:
    """The hosts of a hosts file.

    Args:
        slots: The number of slots of each host.
        n: The number of ranks to start, if there are enough slots.
        min_ranks: The minimum number of ranks.
        probe: Function that starts a probe of the given hosts.
    """

    def __init__(self, slots: Mapping[str, int], n: int, min_ranks: int,
                 probe: Callable[[Iterable[str]], Probe]) -> None:
        self._slots = slots
        self._n = n
        self._min_ranks = min_ranks
        self._probe = probe
        self.interval = _PROBE_INTERVAL + _PER_HOST * len(slots)

    def start_probe(self) -> Probe:
        """Start a probe of all hosts."""
        return self._probe(self._slots)

    def ranks(self, errors: Mapping[str, str]) -> dict[str, int]:
        """Return the number of ranks for each host whose error is empty."""
        return hosts.assign({host: slots for host, slots in self._slots.items()
                              if not errors[host]}, self._n)

    def wait(self, timeout: float, is_interrupted: Callable[[], bool], say: Callable[[str], None]
             ) -> dict[str, int]:
        """Wait until enough hosts are reachable; return the number of ranks for each of them.

        Args:
            timeout: The maximum number of seconds to wait; 0 to probe only once.
            is_interrupted: Function that returns whether to stop waiting.
            say: Function that prints a message.

        Returns:
            An empty dict after a timeout or an interruption.
        """
        clock = RunningClock()
        deadline = clock.poll() + timeout
        has_warned = False
        while True:
            errors = self._wait_for(self.start_probe(), is_interrupted, clock)
            if errors is None:
                return {}
            ranks = self.ranks(errors)
            missing = '; '.join(f'{host} is unreachable ({error})'
                                for host, error in errors.items() if error)
            total = sum(ranks.values())
            if total >= self._min_ranks:
                if total < self._n:
                    why = missing or f'there are {total} slots in the hosts file'
                    say(f'starting {total} of {self._n} ranks: {why}')
                return ranks
            if not has_warned:
                has_warned = True
                say(f'waiting for hosts: the reachable hosts have {total} of the '
                    f'{self._min_ranks} required slots; {missing}')
            pause = clock.poll() + self.interval
            if pause > deadline:
                return {}
            while clock.poll() < pause and not is_interrupted():
                time.sleep(_POLL_INTERVAL)

    @staticmethod
    def _wait_for(probe: Probe, is_interrupted: Callable[[], bool], clock: RunningClock
                  ) -> dict[str, str] | None:
        try:
            while (errors := probe.errors()) is None and not is_interrupted():
                time.sleep(_POLL_INTERVAL)
                clock.poll()
            return None if is_interrupted() else errors
        finally:
            probe.close()


class Watch:
    """Probes the hosts during an attempt and decides whether to stop the attempt.

    A probe can also fail because the host accepts no logins. Therefore, a host counts as lost only
    if its ranks are not connected (for example, while the job starts) and another host responds.

    Args:
        pool: The hosts.
        ranks: The number of ranks on each host of the attempt.
        grow_after: The minimum number of seconds before the job is restarted with more ranks.
        links: The connections of the ranks; ``None`` if they cannot connect.
        say: Function that prints a message.
    """

    def __init__(self, pool: Pool, ranks: Mapping[str, int], grow_after: float,
                 links: Links | None, say: Callable[[str], None]) -> None:
        self._clock = RunningClock()
        now = self._clock.poll()
        self._pool = pool
        self._ranks = ranks
        self._links = links
        self._say = say
        self._may_grow_at = now + grow_after
        self._lost_after = max(_LOST_AFTER, 4 * pool.interval)
        self._probe: Probe | None = None
        self._next_at = now + pool.interval
        self._alive_at = dict.fromkeys(ranks, now)  # when each host was last known to be alive
        self._linked_at = now  # when all connections were last open, or a probe last failed
        self._answered_at = now  # when all hosts last responded
        self._has_warned = False

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._probe is not None:
            self._probe.close()

    def poll(self) -> Ending | None:
        """Return why to stop the attempt, or ``None``. Must be called frequently."""
        now = self._clock.poll()
        if self._links is not None:
            self._links.poll()
        if self._probe is None:
            if now >= self._next_at:
                self._probe = self._pool.start_probe()
            return None
        errors = self._probe.errors()
        if errors is None:
            return None
        self._probe.close()
        self._probe = None
        self._next_at = now + self._pool.interval
        return self._lost(errors, now) or self._growth(errors, now)

    def _lost(self, errors: Mapping[str, str], now: float) -> Ending | None:
        """Return the reason to stop if a host is lost; warn about failing probes."""
        failing = {host: errors[host] for host in self._ranks if errors[host]}
        has_lost_link = self._links is not None and self._links.has_lost_host
        if failing or not has_lost_link:
            self._linked_at = now
        elif now > self._linked_at + self._lost_after:
            return Ending('all hosts are reachable, but the connection to a rank was lost',
                          is_planned=False)
        why = ''
        if self._links is not None and self._links.are_complete:
            why = 'its ranks are connected'
        elif all(errors.values()):
            why = 'no host is reachable'
        for host in self._ranks:
            if why or host not in failing:
                self._alive_at[host] = now
            elif now > self._alive_at[host] + self._lost_after:
                return Ending(f'{host} is unreachable: {errors[host]}', is_planned=False)
        if not failing:
            self._answered_at, self._has_warned = now, False
        elif why and not self._has_warned and now > self._answered_at + self._lost_after:
            self._has_warned = True
            where = hosts.text({host: self._ranks[host] for host in failing})
            self._say(f'warning: for the last {self._lost_after} seconds, no new process could be '
                      f'started on {where} ({next(iter(failing.values()))}). The job continues, '
                      f'because {why}; a restart would wait for these hosts, or start without '
                      'them.')
        return None

    def _growth(self, errors: Mapping[str, str], now: float) -> Ending | None:
        """Return the reason to stop if there are slots for more ranks."""
        more = self._pool.ranks(errors)
        if now < self._may_grow_at or sum(more.values()) <= sum(self._ranks.values()):
            return None
        new = {host: n for host, n in more.items() if host not in self._ranks}
        return Ending(f'more hosts: {hosts.text(new)}', is_planned=True)
