"""``chainermn demo``: train a digit classifier with the script in examples/mnist."""
from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import sys
import tempfile

from chainermn._process import mpiexec

_DESCRIPTION = """\
Trains a small network on 1,797 handwritten digits, on N ranks of this node, in less than a
minute. Requires scikit-learn for the digits and matplotlib for the plots; the extra
"examples" installs both.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('-n', type=int, default=2, metavar='N',
                        help='number of ranks (default: %(default)s)')
    parser.add_argument('--epoch', type=int, default=20, metavar='N',
                        help='number of epochs (default: %(default)s)')
    parser.add_argument('--out', default='result', metavar='FOLDER',
                        help='folder for the log, plots and snapshot (default: %(default)s)')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Replace this process with the job's mpiexec."""
    if options.n < 1 or options.epoch < 1:
        parser.error('-n and --epoch must be positive integers')
    if importlib.util.find_spec('sklearn') is None:
        parser.error('the demo needs scikit-learn. Install it: '
                     f'{sys.executable} -m pip install scikit-learn')
    try:
        program = mpiexec.find()
    except OSError as error:
        parser.error(str(error))
    try:  # fail now instead of after the first epoch
        os.makedirs(options.out, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            pass
    except OSError as error:
        parser.error(f'cannot write results: {error}. Select another folder with --out FOLDER.')
    command = [program, '-n', str(options.n), sys.executable, str(_script()),
               '--epoch', str(options.epoch), '--out', options.out]
    if not sys.stdout.isatty():
        command.append('--no-progress-bar')  # the ranks cannot see where mpiexec's output goes
    os.execve(program, command, mpiexec.environment(options.n))


def _script() -> pathlib.Path:
    """Return the path of train_mnist.py, which the build copies into this folder."""
    here = pathlib.Path(__file__).resolve()
    installed = here.with_name('train_mnist.py')
    if installed.exists():
        return installed
    return here.parents[3] / 'examples' / 'mnist' / 'train_mnist.py'  # in a clone
