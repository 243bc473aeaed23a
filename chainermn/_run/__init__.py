"""``python -m chainermn run``: start an MPI job, and restart it after a failure.

One failing rank aborts the whole job (see `global_except_hook`), so the whole job is restarted.
A script that uses the checkpointer resumes from the last checkpoint.
"""
from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator

from chainermn import _mpiexec, _streams
from chainermn._run._attempt import Attempt, collect_signals, run_once

_MAX_MESSAGES = 3  # per attempt; one bug can fail on a thousand ranks

_DESCRIPTION = """\
Starts an MPI job: N processes that run "python SCRIPT ARGS...". Restarts the job when it
fails. A script with chainermn.extensions.multi_node_snapshot and autoload=True, or one that
calls maybe_load of its checkpointer (chainermn.create_multi_node_checkpointer) before
training, resumes from the last complete snapshot; other scripts start from the beginning.
"""

_EPILOG = """\
example:
  python -m chainermn run -n 4 train.py --epochs 20

Put the options of this command before SCRIPT; everything after SCRIPT is passed to it.

The job is not restarted if
  - it succeeded;
  - this command was interrupted (Ctrl-C) or received SIGTERM or SIGHUP, which end the job;
  - it was already restarted --max-restarts times;
  - two consecutive attempts failed within --startup seconds, which indicates a bug in the
    script.

After a failure, a table on stderr shows the start, duration and result of each attempt.
The exit status is that of mpiexec in the last attempt. If OMP_NUM_THREADS is not set, it is
set to the number of cores of this machine divided by N.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = '%(prog)s -n N [options] SCRIPT [ARGS...]'
    parser.add_argument('-n', type=_at_least(1), required=True, metavar='N',
                        help='number of processes')
    parser.add_argument('--max-restarts', type=_at_least(0), default=3, metavar='K',
                        help='maximum number of restarts (default: %(default)s)')
    parser.add_argument('--startup', type=float, default=10, metavar='SECONDS',
                        help='give up if two consecutive attempts fail within this time '
                             '(default: %(default)s)')
    parser.add_argument('--mpiexec-args', default='', metavar='ARGS',
                        help='additional options for mpiexec: --mpiexec-args="--hosts a,b"')
    parser.add_argument('-m', action='store_true', dest='is_module',
                        help='SCRIPT is a module name, as in "python -m"')
    parser.add_argument('script', metavar='SCRIPT', help='the script that every process runs')
    parser.add_argument('args', metavar='ARGS', nargs=argparse.REMAINDER,
                        help='arguments of the script')


def _at_least(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f'must be an integer of at least {minimum}, not {text}')
        return int(text)

    return number


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the job until it succeeds, or give up.

    Returns:
        The exit status.
    """
    if not options.is_module and not os.path.isfile(options.script):
        parser.error(f'no such script: {options.script}')
    try:
        command = [_mpiexec.find(), '-n', str(options.n), *shlex.split(options.mpiexec_args),
                   sys.executable, *['-m'] * options.is_module, options.script, *options.args]
    except (FileNotFoundError, ValueError) as error:  # no mpiexec, or an unbalanced quote
        parser.error(str(error))
    environment = _mpiexec.environment(options.n)
    attempts: list[Attempt] = []
    with collect_signals() as signals:
        while not attempts or (result := _final_result(attempts, options, signals)) is None:
            if attempts:
                _print(f'job failed after {attempts[-1].duration} ({attempts[-1].result}); '
                       'restarting')
            attempts.append(run_once(command, environment, signals))
    if len(attempts) > 1 or attempts[0].status or signals:
        _print('\n'.join([result, *_table(attempts)]))
    if signals:  # die of the same signal, so that a calling shell script stops, too
        signal.signal(signals[0], signal.SIG_DFL)
        os.kill(os.getpid(), signals[0])
    return attempts[-1].status


def _final_result(attempts: list[Attempt], options: argparse.Namespace, signals: list[int]
                  ) -> str | None:
    """Return the result of the job, or ``None`` if it should be restarted."""
    restarts = len(attempts) - 1
    if signals:
        return f'job terminated by {signal.Signals(signals[0]).name}'
    if attempts[-1].status == 0:
        return f'job succeeded after {_times(restarts)}'
    if restarts >= options.max_restarts:
        after = f' after {_times(restarts)}' if restarts else ''
        return f'job failed{after}: the limit is --max-restarts {options.max_restarts}'
    if restarts and all(one.seconds < options.startup for one in attempts[-2:]):
        return (f'job failed: two consecutive attempts failed within {options.startup:g} seconds '
                '(--startup)')
    return None


def _times(restarts: int) -> str:
    return f'{restarts or "no"} restart{"s" * (restarts != 1)}'


def _table(attempts: list[Attempt]) -> Iterator[str]:
    yield f'  {"attempt":<9}{"started":<21}{"duration":<10}result'
    for number, one in enumerate(attempts, 1):
        started = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(one.started))
        yield f'  {number:<9}{started:<21}{one.duration:<10}{one.result}'
        shown = one.messages[:_MAX_MESSAGES]
        if more := len(one.messages) - len(shown):
            shown.append(f'and {more} more')
        yield from (f'{"":<42}{message}' for message in shown)


def _print(text: str) -> None:
    _streams.write(f'chainermn run: {text}\n')
