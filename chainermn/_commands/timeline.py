"""``chainermn timeline``: merge and summarize the timelines of all ranks.

Ranks write timelines if ``CHAINERMN_TIMELINE`` is set; see ``_timeline/recorder.py``.
"""
from __future__ import annotations

import argparse
import pathlib
import sys

from chainermn._process import streams
from chainermn._timeline import plot, summary, trace_files

_DESCRIPTION = """\
Aligns the timelines of all ranks and summarizes them: how long each rank computed, communicated
and waited, and which rank the others waited for.

  CHAINERMN_TIMELINE=out.json mpiexec -n 4 python train.py
  chainermn timeline out.*.json --png out.png -o merged.json

Open merged.json, or the file of one rank, at https://ui.perfetto.dev or in chrome://tracing.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('files', nargs='+', type=pathlib.Path, metavar='FILE',
                        help='timeline files, one per rank')
    parser.add_argument('-o', type=pathlib.Path, metavar='FILE', dest='merged',
                        help='write one file with all ranks')
    parser.add_argument('--png', type=pathlib.Path, metavar='FILE',
                        help='plot the timeline (needs matplotlib)')
    parser.add_argument('--between', nargs=2, type=float, metavar='SECONDS',
                        help='start and end of the plotted interval (default: four steps in the '
                        'middle of the run)')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status: 1 if ``--png`` was given but matplotlib is missing, otherwise 0.
    """
    if options.between and not 0 <= options.between[0] < options.between[1]:
        parser.error('--between takes a start and an end in seconds; the end must be after the '
                     'start')
    if options.merged in options.files:
        parser.error(f'-o {options.merged} would overwrite the timeline of a rank')
    try:
        run = trace_files.read(options.files)
    except OSError as error:
        is_folder = pathlib.Path(str(error.filename)).is_dir()
        advice = f'. Pass its files: {error.filename}/*.json' if is_folder else ''
        parser.error(f'cannot read the timeline {error.filename}: {error.strerror}{advice}')
    except ValueError as error:
        parser.error(str(error))
    if options.between and options.between[0] >= run.seconds:
        parser.error(f'--between: nothing was recorded after {run.seconds:.3f} s')
    has_plot = options.png is not None and plot.is_available()
    try:
        if options.merged is not None:
            trace_files.write(run, options.merged)
    except OSError as error:
        parser.error(f'argument -o: cannot write {options.merged}: {error.strerror}')
    try:
        if has_plot:
            plot.save(run, options.png, options.between)
    except OSError as error:
        parser.error(f'argument --png: cannot write {options.png}: {error.strerror}')
    print(streams.printable(summary.text(run)))
    if options.merged is not None:
        print(f'\nWrote {options.merged}; open it at https://ui.perfetto.dev or in '
              'chrome://tracing')
    if has_plot:
        print(f'\nWrote {options.png}')
    elif options.png is not None:
        sys.stdout.flush()
        streams.write(f'chainermn timeline: {options.png} was not written, because --png requires '
                      f'matplotlib: {sys.executable} -m pip install matplotlib\n')
        return 1
    return 0
