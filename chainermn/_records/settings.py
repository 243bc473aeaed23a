"""The settings that differ between two records, and the columns that can still be compared."""
from __future__ import annotations

from typing import Any

from chainermn._records.read import RecordedRank

#: Settings that belong to one process and do not explain a difference.
_OF_A_PROCESS = {'format', 'columns', 'rank', 'host', 'first update', 'model', 'command', 'script',
                 'CHAINERMN_RECORD'}
#: Settings that only rank 0 records.
_OF_RANK_0 = {'git commit', 'changed since the commit'}
#: The columns of an update that are numbers, so that their relative difference can be computed.
NUMBERS = 'loss', 'norm of gradients', 'norm of parameters'
#: Summing in a different order changes the numbers of an update by less than this, relatively.
ROUNDING = 1e-4
#: Settings that change the update itself: if one differs, the results differ by more than rounding.
_OF_UPDATES = ('optimizer', 'hooks', 'hyperparameter ', 'update rules', 'frozen parameters')
#: The setting of parameters that only one of the runs has.
NAMES = 'names of parameters'
#: Relative rounding errors of dtypes and of compression.
_PRECISIONS = {'bfloat16': 2**-7, 'Bf16': 2**-7, 'float16': 2**-10, 'mixed16': 2**-10,
               'Fp16': 2**-10, 'float32': 2**-23}


def differing(a: RecordedRank, b: RecordedRank) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by name."""
    ignored = _OF_A_PROCESS if a.settings['rank'] == b.settings['rank'] else (
        _OF_A_PROCESS | _OF_RANK_0)
    found = {name: (a.settings.get(name), b.settings.get(name))
             for name in dict.fromkeys([*a.settings, *b.settings])
             if name not in ignored and a.settings.get(name) != b.settings.get(name)
             and (are_alike(a, b) or (name in a.settings and name in b.settings))}
    one, two = (', '.join(sorted({each[1] for each in record.settings['model'].values()}))
                for record in (a, b))
    if one != two:
        found = {'dtypes of the parameters': (one, two), **found}
    return {NAMES: names, **found} if any(names := unmatched(a, b)) else found


def unmatched(a: RecordedRank, b: RecordedRank) -> tuple[list[str], list[str]]:
    """Return the paths of the parameters of each run that the other run does not have.

    If both runs use Chainer, the lists are empty, because then the models themselves differ.
    """
    if are_alike(a, b) and a.settings.get('framework') != 'PyTorch':
        return [], []
    one, two = a.settings['model'], b.settings['model']
    return [path for path in one if path not in two], [path for path in two if path not in one]


def are_alike(a: RecordedRank, b: RecordedRank) -> bool:
    """Return whether both runs use Chainer, or both use PyTorch."""
    return a.settings.get('framework', 'Chainer') == b.settings.get('framework', 'Chainer')


def rounding(a: RecordedRank, b: RecordedRank) -> tuple[float, str]:
    """Return the largest relative difference that counts as rounding, and the coarser dtype.

    The dtype is ``''`` if both runs have the same precision.
    """
    values = ', '.join(f'{one}, {two}' for name, (one, two) in differing(a, b).items()
                       if 'dtype' in name or name == 'compression').split(', ')
    precision = next((name for name in _PRECISIONS if name in values), '')
    return max(ROUNDING, 10 * _PRECISIONS.get(precision, 0.)), precision


def incomparable(a: RecordedRank, b: RecordedRank) -> set[str]:
    """Return the columns that differ even if the runs are equivalent."""
    found = {'batch'} if rounding(a, b)[1] else set()
    if a.settings.get('loss scale') != b.settings.get('loss scale'):
        found |= {'own', 'mean', 'norm of gradients'}
    return found


def numbers(a: RecordedRank, b: RecordedRank) -> list[str]:
    """Return the columns of :data:`NUMBERS` that can be compared."""
    ignored = incomparable(a, b)
    return [name for name in NUMBERS if name not in ignored]


def change_updates(a: RecordedRank, b: RecordedRank) -> bool:
    """Return whether a setting that changes the update itself differs."""
    return are_alike(a, b) and any(
        name.startswith(_OF_UPDATES) for name in differing(a, b))
