"""``chainermn``, or ``python -m chainermn``: the command line interface.

Each command is a separate module or package.
"""
from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys

from chainermn._version import __version__

#: The help text of each command and the module that defines its ``add_arguments`` and ``main``.
_COMMANDS = {
    'check': ('show and test the installation', 'chainermn._commands.check'),
    'checkpoints': ('verify the checkpoints in a folder',
                    'chainermn.extensions._checkpointing.command'),
    'compare': ('find where two runs begin to differ', 'chainermn._commands.compare'),
    'demo': ('train a digit classifier on several ranks', 'chainermn._commands.demo'),
    'dump': ('print what all ranks of a job are doing', 'chainermn._commands.dump'),
    'top': ('show the ranks of a running job', 'chainermn._commands.top'),
    'timeline': ('summarize, merge and plot timelines of all ranks',
                 'chainermn._commands.timeline'),
    'run': ('start an MPI job and restart it after failures', 'chainermn._commands.run'),
}


def main(args: list[str] | None = None) -> int:
    """Run a command and return its exit status: 141 if stdout is closed, as in ``| head``."""
    try:
        try:
            return _run(args)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # at exit, Python would print an error
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the rest of the output
        return 128 + signal.SIGPIPE


def _run(args: list[str] | None) -> int:
    is_script = os.path.basename(sys.argv[0]) == 'chainermn'
    program = 'chainermn' if is_script else 'python -m chainermn'
    parser = argparse.ArgumentParser(
        prog=program, description='ChainerMN command line interface.',
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
        epilog=f'Run "{program} COMMAND --help" for the options of a command.')
    parser.add_argument('--version', action='version', version=f'chainermn {__version__}')
    commands = parser.add_subparsers(title='commands', metavar='COMMAND', dest='command')
    parsers = {}
    for name, (text, package) in _COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=text, allow_abbrev=False)
        importlib.import_module(package).add_arguments(parsers[name])
    options, unknown = parser.parse_known_args(args)
    if unknown:  # parse_args would print the usage without the command
        from difflib import get_close_matches  # takes a millisecond

        command = parsers.get(options.command, parser)
        hints = [f'. Did you mean {match}?' for each in unknown for match in get_close_matches(
            each.partition('=')[0], command._option_string_actions, 1, .8)]
        command.error(f'unrecognized arguments: {" ".join(unknown)}{"".join(hints[:1])}')
    if options.command is None:
        parser.print_help()
        return 0
    module = importlib.import_module(_COMMANDS[options.command][1])
    return int(module.main(parsers[options.command], options))


if __name__ == '__main__':
    sys.exit(main())
