"""``python -m chainermn run``: starts an MPI job, and starts it again when it has failed.

A job that fails ends as a whole (see `global_except_hook`), so all of it is started again, and a
script that uses the checkpointer goes on by itself where the last checkpoint is.
"""
from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from chainermn import _mpiexec, _streams
from chainermn._run._attempt import Attempt, attempt, noting_signals

_MAX_MESSAGES = 3  # shown for an attempt; one mistake can fail on a thousand ranks

_DESCRIPTION = """\
Starts an MPI job: N processes that run "python SCRIPT ARGS...". When it fails, starts it
again. A script with chainermn.extensions.multi_node_snapshot and autoload=True, or one that
calls maybe_load of its checkpointer (chainermn.create_multi_node_checkpointer) before it
trains, goes on at the last snapshot that is whole; any other starts from the beginning.
"""

_EPILOG = """\
example:
  python -m chainermn run -n 4 train.py --epochs 20

Options of this command come before the script; all that follows the script is its own.

The job is not started again when
  - it ended well;
  - this command was interrupted (Ctrl-C) or got a SIGTERM or SIGHUP; it ends the job;
  - it has been started again --max-restarts times;
  - two attempts in a row failed within --startup seconds each, as by a mistake in the script.

After a failure a table on stderr says when each attempt started, how long it lasted, and why
it ended. The exit status is that of mpiexec in the last attempt. Unless OMP_NUM_THREADS is
set, it becomes the number of cores here divided by N, so that the processes share them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Says what the command takes."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = '%(prog)s -n N [options] SCRIPT [ARGS...]'
    parser.add_argument('-n', type=_from(1), required=True, metavar='N',
                        help='number of processes')
    parser.add_argument('--max-restarts', type=_from(0), default=3, metavar='K',
                        help='start again after a failure so many times at most '
                             '(default: %(default)s)')
    parser.add_argument('--startup', type=float, default=10, metavar='SECONDS',
                        help='two failures in a row, each sooner than this, are taken for a '
                             'mistake in the script (default: %(default)s)')
    parser.add_argument('--mpiexec-args', default='', metavar='ARGS',
                        help='more options for mpiexec: --mpiexec-args="--hosts a,b"')
    parser.add_argument('-m', action='store_true', dest='is_module',
                        help='SCRIPT is the name of a module, as in "python -m"')
    parser.add_argument('script', metavar='SCRIPT', help='the program that each process runs')
    parser.add_argument('args', metavar='ARGS', nargs=argparse.REMAINDER, help='its arguments')


def _from(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f'has to be a number, {least} or more, not {text}')
        return int(text)

    return number


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Runs the job until it ends well, or there is no point in another attempt.

    Returns:
        The exit status.
    """
    if not options.is_module and not os.path.isfile(options.script):
        parser.error(f'there is no script {options.script}')
    try:
        command = [_mpiexec.find(), '-n', str(options.n), *shlex.split(options.mpiexec_args),
                   sys.executable, *['-m'] * options.is_module, options.script, *options.args]
    except (FileNotFoundError, ValueError) as error:  # no mpiexec, or an odd quote
        parser.error(str(error))
    environment = _mpiexec.environment(options.n)
    attempts: list[Attempt] = []
    with noting_signals() as signals:
        while not attempts or (end := _end(attempts, options, signals)) is None:
            if attempts:
                _say(f'the job failed after {attempts[-1].lasted} ({attempts[-1].how}); starting '
                     'it again')
            attempts.append(attempt(command, environment, signals))
    if len(attempts) > 1 or attempts[0].status or signals:
        _say('\n'.join([end, *_table(attempts)]))
    if signals:  # so that a shell knows, and does not go on with its script
        signal.signal(signals[0], signal.SIG_DFL)
        os.kill(os.getpid(), signals[0])
    return attempts[-1].status


def _end(attempts: list[Attempt], options: argparse.Namespace, signals: list[int]) -> str | None:
    """Says why the last attempt is the last one; returns ``None`` if there is to be another."""
    restarts = len(attempts) - 1
    if signals:
        return f'the job was ended by {signal.Signals(signals[0]).name}'
    if attempts[-1].status == 0:
        return f'the job ended well after {_times(restarts)}'
    if restarts >= options.max_restarts:
        after = f' after {_times(restarts)}' if restarts else ''
        return f'the job failed{after}; --max-restarts allows no more than {options.max_restarts}'
    if restarts and all(one.seconds < options.startup for one in attempts[-2:]):
        return (f'the job failed twice within {options.startup:g} seconds of its start; it is not '
                'started again')
    return None


def _times(restarts: int) -> str:
    return f'{restarts or "no"} restart{"s" * (restarts != 1)}'


def _table(attempts: list[Attempt]) -> Iterator[str]:
    yield f'  {"attempt":<9}{"started":<21}{"lasted":<10}ended'
    for number, one in enumerate(attempts, 1):
        started = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(one.started))
        yield f'  {number:<9}{started:<21}{one.lasted:<10}{one.how}'
        shown = one.messages[:_MAX_MESSAGES]
        if more := len(one.messages) - len(shown):
            shown.append(f'and {more} more')
        yield from (f'{"":<42}{message}' for message in shown)


def _say(text: str) -> None:
    _streams.write(f'chainermn run: {text}\n')
