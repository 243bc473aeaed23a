"""``chainermn run``: start an MPI job and restart it after failures.

One failing rank aborts the whole job (see ``global_except_hook``), so the whole job is restarted.
A script that uses the checkpointer resumes from the last checkpoint. With a hosts file, the job
restarts on the reachable hosts.
"""
from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec

from chainermn._commands.options import at_least
from chainermn._commands.run import hosts
from chainermn._commands.run.forwarded_signals import Signals
from chainermn._commands.run.job import Job
from chainermn._commands.run.job_report import say, table
from chainermn._commands.run.run_metrics import RunMetrics
from chainermn._process import environment, metrics_process, mpiexec

_DESCRIPTION = """\
Starts an MPI job of N ranks, each of which runs "python SCRIPT ARGS...", and restarts the
job when it fails. A script resumes from its last complete checkpoint if it calls maybe_load
of its checkpointer (chainermn.create_multi_node_checkpointer) before training, or if it uses
chainermn.extensions.multi_node_snapshot with autoload=True. Other scripts start from the
beginning.
"""

_EPILOG = """\
examples:
  chainermn run -n 4 train.py --epochs 20
  chainermn run -n 4 --min-ranks 2 --hosts-file hosts.txt train.py

Put the options of this command before SCRIPT; everything after SCRIPT is passed to it.

The job is not restarted if
  - it succeeded;
  - this command was interrupted (Ctrl-C) or received SIGTERM or SIGHUP, which stop the job
    within --grace seconds; a second Ctrl-C kills it immediately;
  - it was already restarted --max-restarts times;
  - two consecutive attempts failed within --startup seconds, which indicates a bug in the
    script;
  - the reachable hosts had fewer than --min-ranks slots for --host-timeout seconds.

With --hosts-file, the job starts on the reachable hosts, with N ranks or, if there are fewer
slots, with one rank per slot. When a lost host is reachable again, the job is stopped with
SIGTERM and restarted with more ranks. These restarts do not count toward --max-restarts or
--startup. The environment variable CHAINERMN_RUN_RANKS contains N. SIGUSR1 is forwarded to
the ranks.

After a failure, a table on stderr shows the start, duration and result of each attempt.
The exit status is that of mpiexec in the last attempt. If OMP_NUM_THREADS is not set, it is
set to the number of cores of the node divided by the number of ranks on the node.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = '%(prog)s -n N [options] SCRIPT [ARGS...]'
    parser.add_argument('-n', '-np', type=at_least(1), metavar='N',
                        help='number of ranks')
    parser.add_argument('--max-restarts', type=at_least(0), default=3, metavar='K',
                        help='maximum number of restarts (default: %(default)s)')
    parser.add_argument('--startup', type=_seconds, default=10, metavar='SECONDS',
                        help='give up if two consecutive attempts fail within this time '
                             '(default: %(default)s)')
    parser.add_argument('--grace', type=_seconds, default=30, metavar='SECONDS',
                        help='how long ranks may take to exit after SIGTERM or Ctrl-C before they '
                             'are killed (default: %(default)s)')
    parser.add_argument('--hosts-file', metavar='FILE',
                        help='the hosts to use, one per line: host, host:slots or host slots=N')
    parser.add_argument('--min-ranks', type=at_least(1), metavar='M',
                        help='start with at least M ranks if the reachable hosts have too few '
                             'slots for N (default: N)')
    parser.add_argument('--host-timeout', type=_seconds, default=600, metavar='SECONDS',
                        help='how long to wait for hosts (default: %(default)s)')
    parser.add_argument('--grow-after', type=_seconds, default=300, metavar='SECONDS',
                        help='how long the job runs before it restarts with more ranks '
                             '(default: %(default)s)')
    parser.add_argument('--metrics', type=_target, metavar='TARGET',
                        help='serve the number of attempts and restarts for Prometheus on PORT or '
                             'ADDRESS:PORT, or write them to FILE.prom; CHAINERMN_METRICS does '
                             'the same for the ranks')
    parser.add_argument('--label', action='store_true',
                        help='print the rank before each line of its output, as in "[2] text"')
    parser.add_argument('--log-dir', metavar='FOLDER', type=os.path.abspath,
                        help='also append the output of each rank to FOLDER/rank0.log, '
                             'FOLDER/rank1.log, ...')
    parser.add_argument('--mpiexec-args', default='', metavar='ARGS',
                        help='additional options for mpiexec: --mpiexec-args="-hosts a,b"')
    parser.add_argument('-m', action='store_true', dest='is_module',
                        help='SCRIPT is a module name, as in "python -m"')
    parser.add_argument('script', metavar='SCRIPT', help='the script that every rank runs')
    parser.add_argument('args', metavar='ARGS', nargs=argparse.REMAINDER,
                        help='arguments of the script').required = False


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not number >= 0:  # true for nan
        raise argparse.ArgumentTypeError(f'must be a non-negative number of seconds, not {text}')
    return number


def _target(text: str) -> str:
    try:
        metrics_process.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the job until it succeeds, or give up.

    Returns:
        The exit status.
    """
    if options.n is None:
        parser.error('the following arguments are required: -n' + (
            f'. Put it before SCRIPT: -n N {options.script}'
            if any(each.startswith('-n') for each in options.args) else ''))
    if options.is_module and options.script.endswith('.py'):
        parser.error(f'-m takes a module name, not the file {options.script}. Omit -m to run a '
                     'file.')
    if not options.is_module and not os.path.isfile(options.script):
        parser.error(f'no such script: {options.script}' + (
            f'. chainermn run starts Python itself; use -n {options.n} {" ".join(options.args)}'
            if re.fullmatch(r'python[\d.]*', os.path.basename(options.script)) else ''))
    # mpiexec may start the ranks in another folder or with another PYTHONPATH.
    if options.is_module and not options.mpiexec_args and not _has_package(options.script):
        parser.error(f'no such module: {options.script}')
    try:
        environment.check_flags()
        path, arguments = mpiexec.find(), shlex.split(options.mpiexec_args)
        slots = _slots(options)
        metrics = RunMetrics(options.metrics, options.script)
    except (OSError, ValueError) as error:  # no mpiexec, an unbalanced quote, an invalid file
        parser.error(str(error))
    if options.log_dir is not None:
        try:
            os.makedirs(options.log_dir, exist_ok=True)
        except OSError as error:
            parser.error(f'argument --log-dir: cannot create the folder {options.log_dir}: '
                         f'{error.strerror}')
    program = [sys.executable, *['-m'] * options.is_module, options.script, *options.args]
    # SIGUSR2 would kill MPICH's mpiexec.
    signals = Signals([signal.SIGUSR1, *[signal.SIGUSR2] * mpiexec.is_open_mpi(path)])
    with signals.collect():
        job = Job(path, arguments, program, options, signals, metrics)
        result = job.run_on(slots) if slots else job.run()
    metrics.close()
    attempts = job.attempts
    if signals.ending is not None and len(attempts) == 1 and not attempts[0].messages:
        say(result)
    elif len(attempts) != 1 or attempts[0].status:
        say('\n'.join([result, *table(attempts)]) if attempts else result)
        own = [word for word in options.args if word.startswith('--')
               and word.partition('=')[0] in parser._option_string_actions]
        if own and signals.ending is None and attempts and attempts[-1].status and (
                attempts[-1].seconds < options.startup):
            say(f'{own[0]} after {options.script} was passed to the script. Put options of '
                f'chainermn run before {options.script}.')
    if signals.ending is not None:
        # Exit with the same signal, so that a calling shell script also stops.
        signal.signal(signals.ending, signal.SIG_DFL)
        os.kill(os.getpid(), signals.ending)
    return attempts[-1].status if attempts else 1


def _has_package(module: str) -> bool:
    """Return whether a module, or the package that contains it, exists; import nothing."""
    name = module.partition('.')[0]
    with contextlib.suppress(ValueError):  # '' or a module without __spec__
        return bool(PathFinder.find_spec(name, [os.getcwd()]) or find_spec(name))
    return bool(name)


def _slots(options: argparse.Namespace) -> dict[str, int]:
    """Return the number of slots of each host; empty without a hosts file."""
    if options.hosts_file is None:
        if options.min_ranks is not None:
            raise ValueError('--min-ranks requires --hosts-file, a file with one line per host: '
                             'host, host:slots or host slots=N')
        return {}
    if (options.min_ranks or 1) > options.n:
        raise ValueError(f'--min-ranks {options.min_ranks} is greater than -n {options.n}')
    try:
        slots = hosts.read(options.hosts_file)
    except OSError as error:
        raise ValueError(f'cannot read --hosts-file {options.hosts_file}: {error.strerror}. '
                         'The file must have one line per host: host, host:slots or host slots=N'
                         ) from error
    if sum(slots.values()) < (options.min_ranks or options.n):
        option, required = ('-n', options.n) if options.min_ranks is None else (
            '--min-ranks', options.min_ranks)
        raise ValueError(f'{options.hosts_file} has {sum(slots.values())} slots, but {option} '
                         f'{required} needs {required}. Add slots, as in "host:4".')
    return slots
