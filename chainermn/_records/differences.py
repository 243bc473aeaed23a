"""Finds where two runs begin to differ."""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from chainermn._records.read import RecordedRank, RecordedRun, Row

#: Settings of one process, which explain no difference.
_OF_A_PROCESS = {'format', 'columns', 'rank', 'host', 'first update', 'model', 'command', 'script'}

_RANDOM = {'numpy': 'the random numbers of numpy.random',
           'python': 'the random numbers of the module random',
           'torch': 'the random numbers of PyTorch'}
#: Results, in the order in which an update computes them.
_RESULTS = {'loss': 'the loss', 'own': 'the gradients of the rank', 'mean': 'the mean gradients',
            'parameters': 'the parameters after the update'}
#: What an update has, in the order of cause, with what it is.
_CAUSES = {'copied': 'a step: one run copies the parameters of rank 0 instead',
           **_RANDOM, 'batch': 'the batch', **_RESULTS}
#: All but random numbers, which explain nothing if all else is the same.
_EXPLAINED = {name: what for name, what in _CAUSES.items() if name not in _RANDOM}
#: What follows if everything before is the same.
_HINTS = {
    'loss': 'The batch and the random numbers are the same: the model, the loss function or the '
            'kernels differ, or the parameters were changed between two updates.',
    'own': 'The loss is the same: the backward pass differs.',
    'mean': 'The gradients of the ranks are the same: averaging differs, such as the communicator '
            'or compression; on one rank, the backward pass does.',
    'parameters': 'The gradients are the same: the optimizer, a hyperparameter or a hook differs.'}
#: The numbers of an update whose size can be compared.
NUMBERS = 'loss', 'norm of gradients', 'norm of parameters'

#: Another order of additions changes the numbers of an update by less than this, relatively.
_ROUNDING = 1e-4
#: By so much more than before, another computation changes them.
_JUMP = 100
_NEAR = 50  # updates in which a batch is looked for


class Difference(NamedTuple):
    """The first difference between two runs, or the first one beyond rounding."""

    update: int  # number; 0: before the first update
    rank: str
    what: str
    notes: list[str]
    is_rounding: bool = False
    ranks: Sequence[str] = ()  # all that differ in this way, if it is known


class _Found(NamedTuple):
    """A difference in a row of a rank; the first one is the smallest."""

    position: int  # of the update in the record
    cause: int  # position in _CAUSES
    rank: str

    @property
    def column(self) -> str:
        return [*_CAUSES][self.cause]


def settings(a: RecordedRank, b: RecordedRank) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by name."""
    names = dict.fromkeys([*a.settings, *b.settings])
    return {name: (a.settings.get(name), b.settings.get(name)) for name in names
            if name not in _OF_A_PROCESS and a.settings.get(name) != b.settings.get(name)}


def between(a: RecordedRun, b: RecordedRun) -> list[Difference]:
    """Return the first difference between two runs; if it is rounding, the first other one, too."""
    common = [name for name in a.ranks if name in b.ranks]
    for name in common:
        if notes := _initial(a.ranks[name], b.ranks[name]):
            return [Difference(0, name, 'the initial parameters', notes)]
    if a.size != b.size:
        return [*_of_other_sizes(a, b, common[0])]
    found = min((each for name in common if (each := _first(
        name, a.ranks[name], b.ranks[name], _EXPLAINED))), default=None)
    if found is None:
        return []
    cause = min([found, *(each for name in common if (each := _first(
        name, a.ranks[name], b.ranks[name], _RANDOM)))])
    difference = _described(a, b, cause)
    if cause.column in _RANDOM:
        difference.notes.append(f'The next difference: {_CAUSES[found.column]}, update '
                                f'{_number(a, found)}, {found.rank}.')
    if not difference.is_rounding:
        return [difference]
    other = min((each for name in common if (each := _beyond_rounding(
        name, a.ranks[name], b.ranks[name], found.position))), default=None)
    return [difference] if other is None else [difference, _described(a, b, other)._replace(
        is_rounding=False, what=_CAUSES[other.column])]


def of_ranks(run: RecordedRun) -> list[Difference]:
    """Return the first update after which the replicas of a run differ, if there is one."""
    pairs = [(next(iter(run.replicas(name))), name) for name in run.ranks]
    found = min(((index, first, name) for first, name in pairs if (index := _index(
        run.ranks[first], run.ranks[name], ['parameters'])) is not None), default=None)
    if found is None:
        return []
    index, first, name = found
    one, two = run.ranks[first], run.ranks[name]
    number = int(one.row(index)['update'])
    return [Difference(number, f'{first} and {name}', _CAUSES['parameters'], [
        *_parameters(one.details.get(number, {}), two.details.get(number, {}),
                     ['before', 'mean', 'after'])] or [_advice(number)])]


def growth(a: RecordedRank, b: RecordedRank, number: int) -> list[tuple[int, dict[str, float]]]:
    """Return the relative differences of a rank in some updates after a difference.

    Args:
        a: The record of the rank in one run.
        b: The record in the other.
        number: The update that differs first.
    """
    n = min(len(a), len(b))
    index = next((index for index in range(n) if int(a.row(index)['update']) >= number), n)
    step, found = 1, []
    while index < n:
        values = {key: relative(a.row(index)[key], b.row(index)[key]) for key in NUMBERS}
        found.append((int(a.row(index)['update']), {
            key: value for key, value in values.items() if value is not None}))
        is_last = index == n - 1
        index, step = (n if is_last else min(index + step, n - 1)), step * 4
    return found


def relative(a: Any, b: Any) -> float | None:
    """Return the relative difference of two numbers; ``None`` if one is unknown."""
    if '-' in (a, b):
        return None
    x, y = float(a), float(b)
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.
    is_finite = math.isfinite(x) and math.isfinite(y)
    return abs(x - y) / max(abs(x), abs(y)) if is_finite else math.inf


def _index(a: RecordedRank, b: RecordedRank, columns: Iterable[str], only: int | None = None
           ) -> int | None:
    """Return the index of the first update, or of only one, in which two ranks differ."""
    n = min(len(a), len(b))
    for index in range(n) if only is None else range(only, min(n, only + 1)):
        if a.lines[index] != b.lines[index] and _column(a.row(index), b.row(index), columns):
            return index
    return None


def _first(name: str, a: RecordedRank, b: RecordedRank, columns: Iterable[str]) -> _Found | None:
    """Return the first difference of a rank; of random numbers, only if they are used."""
    for index in range(min(len(a), len(b))):
        if a.lines[index] == b.lines[index]:
            continue
        row, other = a.row(index), b.row(index)
        for column in columns:
            if row[column] == other[column] or '-' in (row[column], other[column]):
                continue
            is_used = column not in _RANDOM or any(
                index + 1 < len(each) and each.row(index + 1)[column] != each.row(index)[column]
                for each in (a, b))
            if is_used:
                return _Found(index, [*_CAUSES].index(column), name)
    return None


def _column(a: Row, b: Row, columns: Iterable[str]) -> str:
    return next((name for name in columns if a[name] != b[name]
                 and '-' not in (a[name], b[name])), '')


def _beyond_rounding(name: str, a: RecordedRank, b: RecordedRank, begin: int) -> _Found | None:
    """Return the first difference that is not the growth of rounding errors."""
    largest = _ROUNDING / _JUMP
    for index in range(begin, min(len(a), len(b))):
        row, other = a.row(index), b.row(index)
        if _column(row, other, ['batch']):
            return _Found(index, [*_CAUSES].index('batch'), name)
        for column, key in zip(('loss', 'mean', 'parameters'), NUMBERS, strict=True):
            if (relative(row[key], other[key]) or 0.) > largest * _JUMP:
                return _Found(index, [*_CAUSES].index(column), name)
        largest = max([largest, *(relative(row[key], other[key]) or 0. for key in NUMBERS)])
    return None


def _initial(a: RecordedRank, b: RecordedRank) -> list[str]:
    """Return how the parameters before the first update differ."""
    before, after = a.settings['model'], b.settings['model']
    paths = dict.fromkeys([*before, *after])
    differing = [path for path in paths if before.get(path) != after.get(path)]
    if not differing or max(int(each.settings['first update']) for each in (a, b)) > 1:
        return []
    one, two = (_shape(model.get(differing[0])) for model in (before, after))
    return [f'{len(differing)} of {len(paths)} parameters differ, such as {differing[0]}' + (
        '' if one == two else f': {one} | {two}')]


def _shape(entry: list[Any] | None) -> str:
    return 'none' if entry is None else f'{tuple(entry[:-2])} {entry[-2]}'


def _described(a: RecordedRun, b: RecordedRun, found: _Found) -> Difference:
    one, two = a.ranks[found.rank], b.ranks[found.rank]
    row, other = one.row(found.position), two.row(found.position)
    number = int(row['update'])
    notes = _batch(a, b, found) if found.column == 'batch' else []
    if found.column == 'copied':
        notes.append(f'{"A" if row["copied"] == "True" else "B"} does so after a resume or if '
                     'layers are initialized. After a resume, each update steps if the optimizer '
                     'is an argument, too: checkpointer.maybe_load(trainer, optimizer).')
    what = _CAUSES[found.column]
    if found.column in _RESULTS:
        places = [*_places(one.details.get(number), two.details.get(number))][:3]
        notes += places or [_HINTS[found.column], _advice(number)]
        if places and 'before the update' in places[0]:
            what = 'the parameters before the update'
    is_rounding = found.column in _RESULTS and all(
        (relative(row[key], other[key]) or 0.) < _ROUNDING for key in NUMBERS)
    ranks = [name for name in a.replicas(found.rank) if name in b.ranks and _index(
        a.ranks[name], b.ranks[name], [found.column], found.position) is not None]
    return Difference(number, found.rank, what, notes, is_rounding, ranks)


def _number(run: RecordedRun, found: _Found) -> str:
    return run.ranks[found.rank].row(found.position)['update']


def _advice(number: int) -> str:
    return (f'To see which function or parameter it is, record again with digests of all of them '
            f'in update {number}: details=1, or CHAINERMN_RECORD_DETAILS=1.')


def _batch(a: RecordedRun, b: RecordedRun, found: _Found) -> list[str]:
    """Return what is known about a batch that differs."""
    index = found.position
    row, other = (run.ranks[found.rank].row(index) for run in (a, b))
    if row['examples'] == other['examples']:
        return ['It has the same examples in another order.']
    if _examples(a, index, found.rank) == _examples(b, index, found.rank):
        return ['All ranks together have the same examples, distributed in another way.']
    notes = []
    for text, run, digest, where in (('B', b, row['batch'], 'A'), ('A', a, other['batch'], 'B')):
        notes += [f'The batch of {where} is that of update {record.row(near)["update"]} of {rank} '
                  f'in {text}.' for rank, record in run.ranks.items()
                  for near in range(max(0, index - _NEAR), min(len(record), index + _NEAR))
                  if record.row(near)['batch'] == digest][:1]
    return notes


def _examples(run: RecordedRun, index: int, name: str) -> int:
    """Return a digest of the examples of all ranks in an update, in any order."""
    digests = [record.row(index)['examples'] for record in run.replicas(name).values()
               if index < len(record)]
    return sum(int(each, 16) for each in digests if each != '-') & 0xffffff


def _places(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield which parameters and functions differ in a detailed update, in the order of cause."""
    if a is None or b is None:
        return
    yield from _parameters(a, b, ['before'])
    for one, two in zip(a.get('functions', []), b.get('functions', []), strict=False):
        if one[0] != two[0]:
            yield f'A calls {one[0]} at {one[1]}, where B calls {two[0]} at {two[1]}'
            break
        if one[3:] != two[3:]:
            where = f' in {one[2]}' if one[2] else ''
            yield f'the output of {one[0]}{where}, called at {one[1]}{_norms(one[3], two[3])}'
            break
    yield from _parameters(a, b, ['own', 'mean'])
    for name, one in a.get('hyperparameters', {}).items():
        if one != (two := b.get('hyperparameters', {}).get(name, one)):
            yield f'the hyperparameter {name}: {one} | {two}'
    yield from _parameters(a, b, ['after'])


_TEXTS = {'before': 'the parameter {} before the update', 'own': "the rank's gradient of {}",
          'mean': 'the mean gradient of {}', 'after': 'the parameter {} after the update'}


def _parameters(a: Mapping[str, Any], b: Mapping[str, Any], keys: Iterable[str]) -> Iterator[str]:
    for key in keys:
        one, two = a.get(key, {}), b.get(key, {})
        for path in one:
            if path in two and one[path] != two[path]:
                yield _TEXTS[key].format(path) + _norms(one[path], two[path])
                break


def _norms(a: list[Any] | None, b: list[Any] | None) -> str:
    """Return by how much two arrays differ, if their norms are known."""
    if not a or not b or len(a) < 2 or len(b) < 2:
        return ''
    value = relative(a[1], b[1])
    return f', relative difference of the norms {value:.1e}' if value else ', by rounding'


def _of_other_sizes(a: RecordedRun, b: RecordedRun, name: str) -> Iterator[Difference]:
    """Yield the first difference of runs with other numbers of ranks: of all ranks together."""
    one, two = a.ranks[name], b.ranks[name]
    for index in range(min(len(one), len(two))):
        row, other = one.row(index), two.row(index)
        number = int(row['update'])
        if _examples(a, index, name) != _examples(b, index, name):
            yield Difference(number, 'all ranks', 'the examples in the batches of all ranks', [])
            return
        for key, column in (('norm of gradients', 'mean'), ('norm of parameters', 'parameters')):
            value = relative(row[key], other[key])
            if value is not None and value > _ROUNDING:
                yield Difference(number, name, _CAUSES[column], [f'{key}: {value:.1e} relative'])
                return
