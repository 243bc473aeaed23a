"""A job: its attempts, one after another, until one succeeds or there is a reason to give up."""
from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterable, Mapping

from chainermn._commands.run import rank_output
from chainermn._commands.run.attempt import run_once
from chainermn._commands.run.forwarded_signals import Signals
from chainermn._commands.run.job_links import Links
from chainermn._commands.run.job_report import Attempt, failure, restarts_text, say
from chainermn._commands.run.pool import Pool, Watch
from chainermn._commands.run.probe import Probe
from chainermn._commands.run.run_metrics import RunMetrics
from chainermn._process import environment, mpiexec


class Job:
    """A job that is restarted when it fails.

    Args:
        path: The path of mpiexec.
        arguments: Additional options for mpiexec.
        program: The command of each rank.
        options: The options of this command.
        signals: The signals of this process.
        metrics: The metrics that count the attempts.
    """

    def __init__(self, path: str, arguments: list[str], program: list[str],
                 options: argparse.Namespace, signals: Signals, metrics: RunMetrics) -> None:
        self._mpiexec = path
        self._arguments = arguments
        self._program = program
        self._options = options
        self._signals = signals
        self._metrics = metrics
        self.attempts: list[Attempt] = []

    def run(self) -> str:
        """Run the job on the hosts that mpiexec selects; return its result."""
        n = self._options.n
        command = [self._mpiexec, '-n', str(n), *self._arguments]
        result = None
        while result is None:
            self._metrics.publish(self.attempts, True)
            self.attempts.append(run_once(
                [*command, *self._rank_command()], self._environment(n), self._signals,
                self._options.grace))
            self._metrics.publish(self.attempts, False)
            result = self._result()
        return result

    def run_on(self, slots: Mapping[str, int]) -> str:
        """Run the job on the reachable hosts; return its result.

        Args:
            slots: The number of slots of each host.
        """
        options, signals = self._options, self._signals
        is_open_mpi = mpiexec.is_open_mpi(self._mpiexec)

        def command(ranks: Mapping[str, int], program: list[str], *exported: str) -> list[str]:
            exported = environment.RUN_RANKS, 'OMP_NUM_THREADS', *exported
            return [self._mpiexec, *mpiexec.host_options(is_open_mpi, ranks, exported),
                    '-n', str(sum(ranks.values())), *self._arguments, *program]

        def probe(hosts: Iterable[str]) -> Probe:
            program = [sys.executable, '-I', '-S', '-c', '']
            return Probe({host: command({host: 1}, program) for host in hosts},
                         self._environment(1))

        min_ranks = options.min_ranks or options.n
        pool = Pool(slots, options.n, min_ranks, probe)
        while ranks := pool.wait(options.host_timeout, lambda: signals.ending is not None, say):
            with contextlib.ExitStack() as stack:
                links, env = None, self._environment(max(ranks.values()))
                if environment.flag(environment.HOST_LINKS, default=True):
                    links = stack.enter_context(contextlib.closing(Links(sum(ranks.values()))))
                    env[environment.RUN_LINK] = str(links.offer)
                watch = stack.enter_context(Watch(pool, ranks, options.grow_after, links, say))
                exported = [environment.RUN_LINK] * (links is not None)
                self._metrics.publish(self.attempts, True)
                self.attempts.append(run_once(
                    command(ranks, self._rank_command(), *exported), env, signals,
                    options.grace, ranks, watch.poll))
                self._metrics.publish(self.attempts, False)
            if (result := self._result()) is not None:
                return result
        return self._interruption() or (
            f'job failed: for {options.host_timeout:g} seconds (--host-timeout), the reachable '
            f'hosts had fewer than {min_ranks} slots')

    def _rank_command(self) -> list[str]:
        """Return the command of each rank in the next attempt."""
        options = self._options
        if not options.label and options.log_dir is None:
            return self._program
        return [sys.executable, '-I', '-S', rank_output.__file__, str(len(self.attempts) + 1),
                str(int(options.label)), options.log_dir or '', *self._program]

    def _environment(self, ranks_per_host: int) -> dict[str, str]:
        return {**mpiexec.environment(ranks_per_host),
                environment.RUN_RANKS: str(self._options.n)}

    def _interruption(self) -> str:
        ending = self._signals.ending
        return '' if ending is None else f'job terminated by {signal.Signals(ending).name}'

    def _result(self) -> str | None:
        """Return the result, or announce a restart and return ``None``."""
        last = self.attempts[-1]
        if self._signals.ending is not None:
            return self._interruption()
        if last.status == 0:
            return f'job succeeded after {restarts_text(len(self.attempts) - 1)}'
        if why := failure(self.attempts, self._options.max_restarts, self._options.startup):
            return why
        event = 'ended' if last.is_planned else 'failed'
        say(f'job {event} after {last.duration} ({last.result}); restarting')
        return None
