"""``chainermn compare``: find where two recorded runs begin to differ."""
from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from chainermn._process import streams
from chainermn._records import differences, settings
from chainermn._records.differences import Difference
from chainermn._records.read import RecordedRun

_DESCRIPTION = """\
Finds where two runs begin to differ: in a setting, a batch, random numbers, the output of a
function, a gradient or an update, and on which rank. With only one record, compares the
replicas on its ranks.

  CHAINERMN_RECORD=a mpiexec -n 4 python train.py
  CHAINERMN_RECORD=b mpiexec -n 4 python train.py
  chainermn compare a b

With a Trainer, add chainermn.extensions.RunRecord() instead of setting the variable.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('a', type=pathlib.Path, metavar='A', help='folder of the first record')
    parser.add_argument('b', type=pathlib.Path, metavar='B', nargs='?',
                        help='folder of the second record')
    parser.add_argument('--plot', type=pathlib.Path, metavar='FILE',
                        help='plot losses and differences, as PNG (needs matplotlib)')
    parser.add_argument('--json', action='store_true', help='print the result as JSON')


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status: 1 if there is a difference, 2 if the plot cannot be written.
    """
    if options.plot is not None and options.b is None:
        parser.error('--plot requires two records')
    try:
        a = RecordedRun(options.a)
        b = RecordedRun(options.b) if options.b else None
        if b is None and len(a.ranks) == 1 < a.size:
            raise ValueError(f'{options.a} contains the record of only one of {a.size} ranks. '
                             'Record all ranks (add RunRecord or set CHAINERMN_RECORD on each of '
                             'them), or pass the records of two runs.')
        if empty := [run for run in (a, b) if run is not None and not _updates(run)]:
            raise ValueError(f'{empty[0].folder} contains no updates: the run ended before its '
                             'first update, or has just started')
    except (OSError, ValueError) as error:
        parser.error(str(error))
    found = differences.between(a, b) if b else differences.of_ranks(a)
    result = _result(a, b, found)
    print(json.dumps(result, indent=2) if options.json
          else streams.printable('\n'.join(_lines(result, found))))
    if options.plot is not None and b is not None:
        if importlib.util.find_spec('matplotlib') is None:
            sys.stdout.flush()
            streams.write(f'chainermn compare: {options.plot} was not written, because --plot '
                          f'requires matplotlib: {sys.executable} -m pip install matplotlib\n')
            return 2
        from chainermn._records import plot

        try:
            plot.save(a, b, options.plot)
        except (OSError, ValueError) as error:
            parser.error(f'cannot write the plot {options.plot}: {error}')
    return int(bool(found))


def _result(a: RecordedRun, b: RecordedRun | None, found: Sequence[Difference]
            ) -> dict[str, Any]:
    result: dict[str, Any] = {'A': _summary(a)}
    if b is None:
        result['settings'] = {
            f'{setting} on {first} | {other}': values for other in a.ranks
            for first in [next(iter(a.replicas(other)))]
            for setting, values in settings.differing(a.ranks[first], a.ranks[other]).items()}
    else:
        result['B'] = _summary(b)
        result['settings'] = {}
        for name in a.ranks:
            if name in b.ranks:
                for key, values in settings.differing(a.ranks[name], b.ranks[name]).items():
                    result['settings'].setdefault(key, values)
    result['differences'] = [each._asdict() for each in found]
    if found and b is not None and found[0].rank in b.ranks:
        result['growth'] = differences.growth(a, b, found[0].rank, found[0].update)
    return result


def _summary(run: RecordedRun) -> dict[str, Any]:
    least = min(run.ranks, key=lambda name: len(run.ranks[name]))
    return {'folder': str(run.folder), 'ranks': run.size, 'updates': _updates(run),
            'most updates': max(map(len, run.replicas(least).values())), 'missing': run.missing}


def _updates(run: RecordedRun) -> int:
    return min(map(len, run.ranks.values()))


def _count(n: int, what: str) -> str:
    return f'{n} {what}' if n == 1 else f'{n} {what}s'


def _count_updates(summary: dict[str, Any]) -> str:
    least, most = summary['updates'], summary['most updates']
    return _count(least, 'update') if least == most else (
        f'{least} to {most} updates, depending on the rank')


def _no_difference(result: dict[str, Any]) -> str:
    if 'B' not in result:
        a = result['A']
        return 'All ranks have the same parameters after each update' + (
            '.' if a['updates'] == a['most updates'] else ' that all of them recorded.')
    if result['A']['ranks'] == result['B']['ranks'] and settings.NAMES not in result['settings']:
        return ('All updates that both runs recorded are identical: batches, losses, gradients and '
                'parameters.')
    return ('All updates that both runs recorded have the same examples and, up to rounding, the '
            'same gradients and parameters.')


def _lines(result: dict[str, Any], found: Sequence[Difference]) -> list[str]:
    lines = [f'{key}: {result[key]["folder"]}, {_count(result[key]["ranks"], "rank")}, '
             f'{_count_updates(result[key])}'
             + ''.join(f'; {name} is missing' for name in result[key]['missing'])
             for key in ('A', 'B') if key in result]
    if result['settings']:
        lines += ['', 'Settings that differ (A | B):']
        shown = [*result['settings'].items()]
        lines += [f'  {name}: {_short(one)} | {_short(two)}' for name, (one, two) in shown[:12]]
        lines += [f'  and {len(shown) - 12} more (--json shows all)'] if len(shown) > 12 else []
    if settings.NAMES in result['settings']:
        lines.append('  Parameters are compared by name, as chainer_compat.to_torch names them. '
                     'If the names differ, only batches, losses and norms are compared. To also '
                     'compare each parameter, use the same names.')
    lines.append('')
    if not found:
        return [*lines, _no_difference(result)]
    for each in found:
        kind = ('First difference (rounding only)' if each.is_rounding else
                'First difference' if each is found[0] else 'First difference beyond rounding')
        where = f'update {each.update}' if each.update else 'before the first update'
        lines.append(f'{kind}: {each.what}, {where}, {_ranks(each, result["A"]["ranks"])}')
        lines += [f'  {note}' for note in each.notes]
    if result.get('growth'):
        lines += ['', 'Relative differences:']
        lines += [f'  update {number}: ' + ', '.join(
            f'{key} {value:.1e}' for key, value in values.items())
            for number, values in result['growth'][:8]]
    return lines


def _ranks(difference: Difference, size: int) -> str:
    others = len(difference.ranks) - 1
    if size == 1 or others < 0:
        return difference.rank
    if others + 1 == size:
        return 'all ranks'
    return f'{difference.rank} only' if not others else (
        f'{difference.rank} and {others} other{"s" if others > 1 else ""}')


def _short(value: object) -> str:
    text = 'none' if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f'{text[:57]}...'
