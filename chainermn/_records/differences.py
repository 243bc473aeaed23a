"""Finds where two runs begin to differ."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from chainermn._operations.ranks import group_ranks, ranks_text
from chainermn._records import details, settings
from chainermn._records.read import RecordedRank, RecordedRun, Row
from chainermn._records.run_record import NO_BATCH
from chainermn._records.settings import NUMBERS

_RANDOM = {'numpy': 'the random numbers of numpy.random',
           'python': 'the random numbers of the module random',
           'torch': 'the random numbers of PyTorch',
           'cupy': 'the seed of the random numbers of CuPy'}
#: Results, in the order in which an update computes them.
_RESULTS = {'loss': 'the loss', 'own': 'the gradients of the rank', 'mean': 'the mean gradients',
            'parameters': 'the parameters after the update'}
#: The columns of an update, from cause to effect, and their descriptions.
_CAUSES = {'copied': 'one run takes a step, and the other copies the parameters of rank 0',
           **_RANDOM, 'batch': 'the batch', **_RESULTS}
#: All columns but random numbers, which explain nothing if everything else is the same.
_EXPLAINED = {name: what for name, what in _CAUSES.items() if name not in _RANDOM}
#: Conclusions if everything before this column is the same.
_HINTS = {
    'loss': 'The batch and the random numbers are the same: the model, the loss function or the '
            'kernels differ, or the parameters were changed between two updates.',
    'own': 'The loss is the same: the backward pass differs.',
    'mean': 'The gradients of the ranks are the same: averaging differs, for example the '
            'communicator or the compression. With one rank, the backward pass differs.',
    'parameters': 'The gradients are the same: the optimizer, a hyperparameter or a hook differs.'}
_HINTS_OF_RANKS = {
    'mean': 'The gradients that the ranks use for the update differ: averaging differs, or a hook '
            'on one rank changes them.',
    'parameters': 'The mean gradients are the same: the optimizer, a hyperparameter or a hook '
                  'differs, or the parameters were changed on one rank since the last update.'}
#: After identical updates, in which the same kernels ran, rounding is less than this.
_LATE_ROUNDING = 1e-5
#: The norms that are compared instead of digests if parameters have different names.
_NORMS = {'mean': 'norm of gradients', 'parameters': 'norm of parameters'}
#: Growth by more than this factor is not rounding.
_JUMP = 100
_NEAR = 50  # updates, before and after, in which to look for a batch


class Difference(NamedTuple):
    """The first difference between two runs, or the first one beyond rounding."""

    update: int  # number of the update; 0 means before the first update
    rank: str
    what: str
    notes: list[str]
    is_rounding: bool = False
    ranks: Sequence[str] = ()  # all ranks that differ in this way, if known


class _Found(NamedTuple):
    """A difference in a row of a rank. The earliest difference compares as the smallest."""

    position: int  # position of the update in the record
    cause: int  # position in _CAUSES
    rank: str
    call: int  # number of the update, counted over all optimizers of the rank

    @property
    def column(self) -> str:
        return [*_CAUSES][self.cause]


def between(a: RecordedRun, b: RecordedRun) -> list[Difference]:
    """Return the first difference between two runs.

    If it is only rounding, also return the first difference that is not.
    """
    common = [name for name in a.ranks if name in b.ranks]
    for name in common:
        if notes := _initial(a.ranks[name], b.ranks[name]):
            return [Difference(0, name, 'the initial parameters', notes)]
    if a.size != b.size:
        return [*_of_different_sizes(a, b, common[0])]
    found = _earliest(common, lambda name: _first(
        name, a.ranks[name], b.ranks[name], _EXPLAINED))
    if found is None:
        return []
    drawn = None if found.column == 'copied' else _earliest(common, lambda name: _first(
        name, a.ranks[name], b.ranks[name], _RANDOM, _begin(a, name, found, 1)))
    difference = _described(a, b, drawn or found)
    if drawn:
        if drawn.column != 'cupy':
            difference.notes.append(
                'The states of the generator already differ before this update. Random numbers are '
                'drawn in this update, or before the next one.')
        difference.notes.append(f'The next difference: {_CAUSES[found.column]}, update '
                                f'{_number(a, found)}, {found.rank}.')
    if not difference.is_rounding:
        return [difference]
    other = _earliest(common, lambda name: _beyond_rounding(
        name, a.ranks[name], b.ranks[name], _begin(a, name, found)))
    return [difference] if other is None else [difference, _described(a, b, other)._replace(
        is_rounding=False, what=_CAUSES[other.column])]


def _earliest(names: Iterable[str], find: Callable[[str], _Found | None]) -> _Found | None:
    """Return the first of the differences in several records.

    For each rank, this is the difference in the earliest update of any optimizer.
    """
    by_rank: dict[str, list[_Found]] = {}
    for name in names:
        if found := find(name):
            by_rank.setdefault(name.rpartition('rank')[2], []).append(found)
    return min((min(found, key=lambda each: (each.call, each)) for found in by_rank.values()),
               default=None)


def _begin(run: RecordedRun, name: str, found: _Found, n: int = 0) -> int:
    """Return the position of a record at a difference, or ``n`` calls after it."""
    optimizer, rank = found.rank.rpartition('rank')[0], name.rpartition('rank')[2]
    same = run.ranks.get(f'{optimizer}rank{rank}', run.ranks[name])
    return run.ranks[name].position(same.call(min(found.position, len(same) - 1)) + n)


def of_ranks(run: RecordedRun) -> list[Difference]:
    """Return the first difference between the replicas of a run, if there is one.

    Values that an update computes from the batch of a rank are only compared if the ranks have the
    same batch and random numbers.
    """
    columns = 'mean', 'parameters'
    found: list[tuple[int, int, str, str]] = []
    for first in dict.fromkeys(next(iter(run.replicas(name))) for name in run.ranks):
        values = run.ranks[first].columns(columns)
        for name, other in run.replicas(first).items():
            if models := _different_shapes(run.ranks[first], other):
                return [Difference(0, f'{first} and {name}', 'the models', [
                    f'{models}. They are not replicas.'])]
            found += [(index, number, first, name) for number, (one, two) in enumerate(
                zip(values, other.columns(columns), strict=True))
                if (index := _first_index(one, two)) is not None]
    if not found:
        return []
    index, column, first, name = min(found)
    one, two = run.ranks[first], run.ranks[name]
    row, other_row = one.row(index), two.row(index)
    number = int(row['update'])
    groups = group_ranks((record.settings['rank'], record.row(index)[columns[column]])
                         for record in run.replicas(first).values() if index < len(record))
    is_same = row['batch'] == other_row['batch'] != '-' and not any(
        row[each] != other_row[each] and _is_drawn(each, index, one, two) for each in _RANDOM)
    places = [*details.places(one.details(number), two.details(number), (first, name), is_same)][:3]
    changed = _hyperparameters(one, two, index) if columns[column] == 'parameters' else []
    notes = places or changed or [_HINTS_OF_RANKS[columns[column]], *_later(one, two, number)]
    if len(groups) < len(run.replicas(first)):
        notes.append(f'Ranks with the same values: {" | ".join(map(ranks_text, groups.values()))}')
    what = _CAUSES[columns[column]]
    return [Difference(number, f'{first} and {name}', _before(places) or what, notes)]


def _later(a: RecordedRank, b: RecordedRank, number: int) -> Iterator[str]:
    """Yield the parameter that differs before the next detailed update, or advice if unknown."""
    for later in a.detailed:
        places = details.parameters(a.details(later), b.details(later), ['before'])
        if later > number and (place := next(places, '')):
            yield (f'The next update with digests of all parameters is {later}. There, the first '
                   f'difference is {place}')
            return
    yield _advice(number)


def growth(a: RecordedRun, b: RecordedRun, name: str, number: int
           ) -> list[tuple[int, dict[str, float]]]:
    """Return the relative differences on a rank in some updates after a difference.

    With different numbers of ranks, the batch of the rank differs between the runs, so they
    contain the mean loss of all ranks instead of the loss.

    Args:
        a: One run.
        b: The other run.
        name: The name of the rank's record.
        number: The first update that differs.
    """
    one, two = a.ranks[name], b.ranks[name]
    n = min(len(one), len(two))
    index = next((index for index in range(n) if int(one.row(index)['update']) >= number), n)
    step, found, names = 1, [], settings.numbers(one, two)
    while index < n:
        values = {key: details.relative(one.row(index)[key], two.row(index)[key]) for key in names}
        if a.size != b.size:
            del values['loss']
            values = {'mean loss': details.relative(
                a.mean_loss(name, index), b.mean_loss(name, index)), **values}
        found.append((int(one.row(index)['update']), {
            key: value for key, value in values.items() if value is not None}))
        is_last = index == n - 1
        index, step = (n if is_last else min(index + step, n - 1)), step * 4
    return found


def _first_index(a: list[str], b: list[str]) -> int | None:
    """Return the first index at which two columns differ."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y and '-' not in (x, y)), None)


def _first(name: str, a: RecordedRank, b: RecordedRank, columns: Iterable[str],
           end: int | None = None) -> _Found | None:
    """Return the first difference on a rank. Random numbers count only if they are used."""
    ignored, limit = settings.incomparable(a, b), _limit(a, b)
    for index, (line, other_line) in enumerate(zip(a.lines[:end], b.lines[:end], strict=False)):
        if line == other_line:
            continue
        row, other = a.row(index), b.row(index)
        for column in columns:
            if column in ignored or not _differ(row, other, column, limit):
                continue
            if column not in _RANDOM or _is_drawn(column, index, a, b):
                return _found(a, index, column, name)
    return None


def _found(a: RecordedRank, index: int, column: str, name: str) -> _Found:
    return _Found(index, [*_CAUSES].index(column), name, a.call(index))


def _is_drawn(column: str, index: int, *records: RecordedRank) -> bool:
    """Return whether an update draws random numbers; for CuPy, whether there is a generator."""
    return column == 'cupy' or any(
        index + 1 < len(each) and each.row(index + 1)[column] != each.row(index)[column]
        for each in records)


def _limit(a: RecordedRank, b: RecordedRank) -> float:
    """Return the limit for :func:`_differ`."""
    return settings.rounding(a, b)[0] if any(settings.unmatched(a, b)) else 0.


def _differ(a: Row, b: Row, column: str, limit: float) -> bool:
    """Return whether a column differs. If there is a limit, norms are compared, not digests."""
    if limit and (norm := _NORMS.get(column)):
        return (details.relative(a[norm], b[norm]) or 0.) > limit
    return a[column] != b[column] and '-' not in (a[column], b[column])


def _beyond_rounding(name: str, a: RecordedRank, b: RecordedRank, begin: int) -> _Found | None:
    """Return the first difference that is not the growth of rounding errors."""
    n = min(len(a), len(b))
    names = settings.numbers(a, b)
    one, two = (each.columns(['batch', *names], begin, n) for each in (a, b))
    values = np.array([details.relative_all(x, y) for x, y in zip(one[1:], two[1:], strict=True)])
    limit, precision = settings.rounding(a, b)
    least = 10 * limit  # because gradients of ReLUs are discontinuous
    before = np.maximum.accumulate(np.append(least / _JUMP, values.max(axis=0)))
    is_beyond = values > before[:-1] * _JUMP
    index = int(is_beyond.any(axis=0).argmax())
    batch = None if precision else _first_index(one[0], two[0])
    if batch is not None and (batch <= index or not is_beyond.any()):
        return _found(a, begin + batch, 'batch', name)
    if not is_beyond.any():
        return None
    column = dict(zip(NUMBERS, ('loss', 'mean', 'parameters'), strict=True))[
        names[int(is_beyond[:, index].argmax())]]
    return _found(a, begin + index, column, name)


def _initial(a: RecordedRank, b: RecordedRank) -> list[str]:
    """Return a description of the difference between the initial parameters, if there is one."""
    if max(int(each.settings['first update']) for each in (a, b)) > 1:
        return []
    limit = settings.rounding(a, b)[0]

    def differ(one: list[Any], two: list[Any]) -> bool:
        if one[:2] == two[:2]:
            return one[2:] != two[2:]
        return one[0] != two[0] or details.relative_all(one[3:], two[3:]).max(initial=0) > limit

    note = _differing(a, b, differ, [*itertools.chain(*settings.unmatched(a, b))])
    return [note] if note else []


def _different_shapes(a: RecordedRank, b: RecordedRank) -> str:
    """Return a description of the difference between the models' paths or shapes, or ''."""
    return _differing(a, b, lambda one, two: one[:2] != two[:2])


def _differing(a: RecordedRank, b: RecordedRank, differ: Callable[[list[Any], list[Any]], bool],
               ignored: Sequence[str] = ()) -> str:
    models = one, two = a.settings['model'], b.settings['model']
    paths = dict.fromkeys([*one, *two])
    differing = [path for path in paths if path not in ignored and (
        path not in one or path not in two or differ(one[path], two[path]))]
    if not differing:
        return ''
    texts = [f'{tuple(model[differing[0]][0])} {model[differing[0]][1]}'
             if differing[0] in model else 'none' for model in models]
    return f'{len(differing)} of {len(paths)} parameters differ, such as {differing[0]}' + (
        f': {" | ".join(texts)}' if texts[0] != texts[1] else '')


def _described(a: RecordedRun, b: RecordedRun, found: _Found) -> Difference:
    one, two = a.ranks[found.rank], b.ranks[found.rank]
    row, other = one.row(found.position), two.row(found.position)
    number = int(row['update'])
    limit, precision = settings.rounding(one, two)
    norms_limit = _limit(one, two)
    places = [*details.places(one.details(number), two.details(number),
                              limit=precision and limit)][:3]
    changed = _hyperparameters(one, two, found.position) if found.column == 'parameters' else []
    is_rounding = found.column in _RESULTS and not changed and (
        bool(precision) or _can_be_rounding(one, two, places)) and all(
            (details.relative(row[key], other[key]) or 0.) < (
                limit if precision or not found.position else _LATE_ROUNDING)
            for key in settings.numbers(one, two))
    notes = _batch(a, b, found) if found.column == 'batch' else []
    if found.column == 'copied':
        notes.append(f'{"A" if row["copied"] == "True" else "B"} copies the parameters, as after a '
                     'resume or when layers are initialized. After a resume, pass the optimizer as '
                     'well, so that each update changes the parameters: '
                     'checkpointer.maybe_load(trainer, optimizer).')
    what = _CAUSES[found.column]
    if is_rounding and precision:
        notes.append(f'Rounding to {precision} explains differences of up to {limit:.0e}.')
    elif found.column in _RESULTS:
        is_first = not any(
            _differ(row, other, each, norms_limit) and (each not in _RANDOM or _is_drawn(
                each, found.position, one, two)) for each in [*_CAUSES][:found.cause])
        notes += places or changed or [_HINTS[found.column]] * is_first + [_advice(number)]
        what = _before(places) or what
    if name := found.rank.rpartition('rank')[0] or (
            len(a.replicas(found.rank)) < len(a.ranks) and 'the first optimizer'):
        what += f' of {name.rstrip(".")}'
    ranks = [name for name in a.replicas(found.rank) if name in b.ranks
             and found.position < min(len(a.ranks[name]), len(b.ranks[name])) and _differ(
                 a.ranks[name].row(found.position), b.ranks[name].row(found.position),
                 found.column, norms_limit)]
    if is_rounding and len(ranks) < a.size:
        ranks = []  # identical values are a coincidence
    return Difference(number, found.rank, what, notes, is_rounding, ranks)


def _hyperparameters(a: RecordedRank, b: RecordedRank, index: int) -> list[str]:
    """Return descriptions of the hyperparameters that differ in an update."""
    return [*details.hyperparameters(a.hyperparameters(index), b.hyperparameters(index))][:3]


def _can_be_rounding(a: RecordedRank, b: RecordedRank, places: Sequence[str]) -> bool:
    """Return whether no setting of the updates and no parameter before the update differs."""
    return not _before(places) and not settings.change_updates(a, b)


def _before(places: Sequence[str]) -> str:
    return 'the parameters before the update' if places and 'before the update' in places[0] else ''


def _number(run: RecordedRun, found: _Found) -> str:
    return run.ranks[found.rank].row(found.position)['update']


def _advice(number: int) -> str:
    return ('To find the function, parameter or hyperparameter, record again with details of '
            f'update {number}: details=1, or CHAINERMN_RECORD_DETAILS=1.')


def _batch(a: RecordedRun, b: RecordedRun, found: _Found) -> list[str]:
    """Return notes on a batch that differs."""
    index = found.position
    row, other = (run.ranks[found.rank].row(index) for run in (a, b))
    if NO_BATCH in (row['batch'], other['batch']):
        return [f'{"A" if row["batch"] == NO_BATCH else "B"} has already exhausted the inputs of '
                f'{found.rank}.']
    if row['examples'] == other['examples']:
        return ['Both batches contain the same examples, in a different order.']
    if _examples(a, found.rank, index, index + 1) == _examples(b, found.rank, index, index + 1):
        return ['All ranks together have the same examples, distributed differently.']
    notes = []
    for text, run, digest, where in (('B', b, row['batch'], 'A'), ('A', a, other['batch'], 'B')):
        notes += [f"{text} uses {where}'s batch in update "
                  f'{record.row(near)["update"]} of {rank}.' for rank, record in run.ranks.items()
                  for near in range(max(0, index - _NEAR), min(len(record), index + _NEAR))
                  if record.row(near)['batch'] == digest][:1]
    return notes


def _examples(run: RecordedRun, name: str, begin: int, end: int) -> np.ndarray:
    """Return digests of the examples of all ranks in some updates, in any order."""
    total = np.zeros(end - begin, int)
    for record in run.replicas(name).values():
        column, = record.columns(['examples'], begin, end)
        total[:len(column)] += [0 if each == '-' else int(each, 16) for each in column]
    return total & 0xffffff


def _of_different_sizes(a: RecordedRun, b: RecordedRun, name: str) -> Iterator[Difference]:
    """Yield the first difference between runs with different numbers of ranks, over all ranks."""
    records = a.ranks[name], b.ranks[name]
    n = min(map(len, records))
    keys = NUMBERS[1:]
    one, two = (each.columns(['update', *keys], 0, n) for each in records)
    is_other = [_examples(a, name, 0, n) != _examples(b, name, 0, n)]
    values = [details.relative_all(x, y) for x, y in zip(one[1:], two[1:], strict=True)]
    is_other += [each > settings.ROUNDING for each in values]
    updates, kinds = np.nonzero(np.transpose(is_other))
    if not len(updates):
        return
    number, kind = int(one[0][updates[0]]), int(kinds[0])
    if kind == 0:
        yield Difference(number, 'all ranks', 'the examples in the batches of all ranks', [])
    else:
        value = values[kind - 1][updates[0]]
        index = int(updates[0]) - (kind == 1)  # gradients depend on the last update
        notes = _hyperparameters(*records, index) if index >= 0 else []
        yield Difference(number, name, _CAUSES[('mean', 'parameters')[kind - 1]], [
            *notes, f'relative difference of the {keys[kind - 1]}: {value:.1e}'])
