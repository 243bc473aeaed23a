"""``python -m chainermn``: the commands; each is in a package of its own."""
from __future__ import annotations

import argparse
import importlib
import sys

#: What each command does, and the package whose ``add_arguments`` and ``main`` are it.
_COMMANDS = {
    'check': ('show what is installed here, and try it', 'chainermn._check'),
    'checkpoints': ('verify a folder of checkpoints', 'chainermn.extensions._describe'),
    'timeline': ('show where the time of all ranks went', 'chainermn._timeline'),
    'run': ('start an MPI job, and again after a failure', 'chainermn._run'),
}


def main(args: list[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog='python -m chainermn', description='The commands of ChainerMN.', allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
        epilog='"python -m chainermn COMMAND --help" says more.')
    commands = parser.add_subparsers(title='commands', metavar='COMMAND', dest='command')
    parsers = {}
    for name, (text, package) in _COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=text, allow_abbrev=False)
        importlib.import_module(package).add_arguments(parsers[name])
    options = parser.parse_args(args)
    if options.command is None:
        parser.print_help()
        return 0
    module = importlib.import_module(_COMMANDS[options.command][1])
    return int(module.main(parsers[options.command], options))


if __name__ == '__main__':
    sys.exit(main())
