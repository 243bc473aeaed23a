"""``python -m chainermn timeline``: puts the timelines of all ranks together, and reads them.

The ranks write them with ``CHAINERMN_TIMELINE`` in the environment, see
``_tracing/recorder.py``.
"""
from __future__ import annotations

import argparse
import pathlib

from chainermn._timeline import _picture, _read, _summary

_DESCRIPTION = """\
Puts the timelines of all ranks on one clock, and says where the time went: how long each rank
computed, communicated and waited for others, and which rank the others waited for.

  CHAINERMN_TIMELINE=out.json mpiexec -n 4 python train.py
  python -m chainermn timeline out.*.json --png out.png -o merged.json

Open merged.json, or the file of one rank, at https://ui.perfetto.dev or in chrome://tracing.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Says what the command takes."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('files', nargs='+', type=pathlib.Path, metavar='FILE',
                        help='the files of all ranks')
    parser.add_argument('-o', type=pathlib.Path, metavar='FILE', dest='merged',
                        help='write all ranks into one file, on one clock')
    parser.add_argument('--png', type=pathlib.Path, metavar='FILE', help='draw it (matplotlib)')
    parser.add_argument('--between', nargs=2, type=float, metavar='SECONDS',
                        help='what --png shows, from the beginning on; by default four steps from '
                        'the middle')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Reads, prints and writes; returns the exit status."""
    if options.png is not None and not _picture.is_possible():
        parser.error('--png needs matplotlib: pip install matplotlib, or the extra "plot" of '
                     'chainermn')
    if options.between and not 0 <= options.between[0] < options.between[1]:
        parser.error('--between takes two times in seconds, the earlier one first')
    if options.merged in options.files:
        parser.error(f'-o {options.merged} would overwrite the timeline of a rank')
    try:
        run = _read.read(options.files)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(_summary.text(run))
    if options.merged is not None:
        _read.write(run, options.merged)
        print(f'\n{options.merged} has all ranks; open it at https://ui.perfetto.dev or in '
              'chrome://tracing')
    if options.png is not None:
        _picture.draw(run, options.png, options.between)
        print(f'\n{options.png} shows it')
    return 0
