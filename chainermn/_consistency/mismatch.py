"""The error that all ranks raise if their calls do not match, with each rank's call and advice."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chainermn._diagnostics.call_site import IN_EXTENSION
from chainermn._operations import common_error as common_errors
from chainermn._operations.call_signature import PROGRAM, Caller, CallSignature, Place
from chainermn._operations.exceptions import CollectiveMismatchError
from chainermn._operations.ranks import group_ranks, ranks_text, select_groups
from chainermn._operations.table import CALL, DTYPE, END, ENTER_JOIN, SHAPE

# Maximum numbers of parameters, of values of each, of groups of ranks, and of lines in an error.
_MAX_PARAMETERS, _MAX_VALUES, _MAX_GROUPS, _MAX_LINES = 10, 4, 12, 32
#: Advice for each kind of difference. Operations that compare a digest have their own advice.
_ADVICE = {
    'end': 'A rank reached the end of the script while others called a collective. Look for loops '
           'of different lengths (chainermn.join supports them for optimizer updates), or for a '
           'call inside "if comm.rank == ...".',
    'operations': 'All ranks must call the same collectives in the same order. Look for a call '
                  'inside "if comm.rank == ...", or for loops of different lengths (chainermn.join '
                  'supports them for optimizer updates).',
    'join': 'Inside chainermn.join, a rank that has exhausted its inputs takes part in optimizer '
            'updates only, not in other collectives (MultiNodeBatchNormalization, evaluators, '
            'checkpointers, ObservationAggregator). Give all ranks the same number of inputs, '
            'enter join with throw_on_early_termination=True, or call the collective after join.',
    'enter join': 'All ranks must enter chainermn.join at the same place. Enter it on all ranks or '
                  'on none.',
    'updates': 'An update raised an error on one rank, and that rank continued with the next '
               'update. Let the error end your script, or contribute no gradients for the failed '
               'update: model.cleargrads(); optimizer.update(). To continue after this error, load '
               'a checkpoint on all ranks.',
    'callers': 'All ranks must make the same calls in the same order. All ranks must add the same '
               'extensions, with the same triggers, in the same order, and use the same iterators. '
               'Look for an extension or iterator that is created inside "if comm.rank == ...". '
               'Only extensions that do not communicate may be added on a single rank.',
    'roots': 'Pass the same root on all ranks.',
    'ops': 'Pass the same op on all ranks.',
    'dtypes': 'Cast the array before the call, for example x.astype(numpy.float32).',
    'shapes': 'Pass arrays of the same shape; only gather and allgather accept '
              'different shapes.',
}


#: The usual consequence of an error.
NOT_SENT = 'no data was sent'


class RemoteError(NamedTuple):
    """An error of another rank, with its notes, in a form that every rank can unpickle."""

    operation: str
    kind: type[Exception]
    text: str
    consequence: str
    is_complete: bool  # see common_error.mark_complete

    @classmethod
    def of(cls, operation: str, error: Exception, consequence: str = NOT_SENT) -> RemoteError:
        kind = next(kind for kind in type(error).__mro__
                    if kind.__module__.partition('.')[0] in ('builtins', 'chainermn', '_pickle'))
        notes = [f' ({note})' for note in getattr(error, '__notes__', ())]
        return cls(operation, kind, str(error) + ''.join(notes), consequence,
                   common_errors.is_complete(error))

    def error(self, message: str) -> Exception:
        """Return an error of the same class, or of its nearest base that takes only a message."""
        for kind in self.kind.__mro__:
            try:
                return _KeyError(message) if kind is KeyError else kind(message)
            except TypeError:
                continue
        return RuntimeError(message)


class _KeyError(KeyError):
    """A KeyError that shows its message as text; Python shows the repr of a key."""

    __str__ = Exception.__str__


def common_error(signatures: Sequence[CallSignature], failures: Sequence[RemoteError | None],
                 details: Sequence[Mapping[str, str] | None], sites: Sequence[str] = (),
                 callers: Sequence[Caller] = ()) -> Exception:
    """Build the same error on all ranks, from data that all of them have.

    Args:
        signatures: The call of each rank.
        failures: The error of each rank that failed.
        details: The contents of each rank's digest.
        sites: The call site of each rank; not shown if all are the same.
        callers: The caller on each rank.
    """
    every_site = sites
    if len(set(sites)) <= 1:
        sites = [''] * len(signatures)
    callers = callers or [PROGRAM] * len(signatures)
    calls = [f'{caller.name} ({signature})' if caller.name else str(signature)
             for signature, caller in zip(signatures, callers, strict=True)]
    if any(failures):
        return remote_error([call if call == END else f'{caller.name or call}{site}' for
                             caller, call, site in zip(callers, calls, sites, strict=True)],
                            failures)
    if _have_different_options(callers, signatures):
        return CollectiveMismatchError.of('\n'.join([
            f'Collective mismatch: options of {callers[0].name} differ between ranks ({NOT_SENT})',
            *difference_table([caller.options for caller in callers]), callers[0].advice]),
            calls, every_site)
    usual = _usual(signatures)
    differences = [_difference(signature, usual) for signature in signatures]
    what = next(difference for difference in differences if difference)
    if what == 'operations':
        title = 'Collective mismatch: ranks called different operations'
    else:
        names = {caller.name for caller in callers}
        where = f'{names.pop()} ({usual.operation})' if len(names) == 1 and '' not in names else (
            usual.operation)
        title = f'Collective mismatch in {where}: {what} differ between ranks'
    lines = [(f'{call}{"" if call == END else site}',
              f'<- {difference} differ' if difference else '')
             for call, difference, site in zip(calls, differences, sites, strict=True)]
    is_digest = what == usual.declared.digest_of
    if is_digest and all(detail is not None for detail in details):
        table = difference_table([detail or {} for detail in details])
    else:
        table = _table(lines)
    if any(signature.operation == END for signature in signatures):
        what = 'end'
    elif what == 'operations' and any(signature.operation == 'join' for signature in signatures):
        what = 'enter join' if any(signature.operation == 'join' and signature.number >= ENTER_JOIN
                                   for signature in signatures) else 'join'
    elif what == 'operations' and any(IN_EXTENSION in site for site in every_site):
        what = 'callers'
    elif what == 'callers' and len({*every_site}) > 1 and not any(
            IN_EXTENSION in site for site in every_site):
        what = 'operations'  # different lines of user code, not of the same trainer.run()
    advice = usual.declared.advice if is_digest else _ADVICE[what]
    if what in ('operations', 'callers'):
        advice = next((caller.if_missing for caller in callers if caller.if_missing), advice)
    return CollectiveMismatchError.of(
        '\n'.join([f'{title} ({NOT_SENT})', *table, advice]), calls, every_site)


def different_objects_error(name: str, operation: str, places: Sequence[Place],
                            sites: Sequence[str]) -> CollectiveMismatchError:
    """Return the error to raise if ranks use different objects of the same kind.

    Args:
        name: What the objects are.
        operation: The operation.
        places: For each rank, the lines that created its object.
        sites: The call site of each rank.
    """
    return CollectiveMismatchError.of('\n'.join([
        f'Collective mismatch in {name} ({operation}): ranks use objects that were created on '
        f'different lines ({NOT_SENT})',
        *_table([(f'{name} created at {line}{site}', '')
                 for line, site in zip(_differing_lines(places), sites, strict=True)]),
        'Use the objects in the same order on all ranks. Do not take them from a set, because its '
        'order differs between processes.']), [f'{name} ({operation})'] * len(places), sites)


def _differing_lines(places: Sequence[Place]) -> Sequence[str]:
    """Return the innermost line of each rank that is not the same on all ranks."""
    for lines in zip(*places, strict=False):
        if len(set(lines)) > 1:
            return lines
    return [', called at '.join(place) for place in places]


def remote_error(calls: Sequence[object], failures: Sequence[RemoteError | None]) -> Exception:
    """Return the error to raise if some ranks failed.

    Args:
        calls: The call of each rank; only those of ranks that did not fail are shown.
        failures: The error of each rank that failed, and ``None`` for the other ranks.
    """
    failed = [rank for rank, failure in enumerate(failures) if failure]
    first = failures[failed[0]]
    assert first is not None
    if len(failed) == 1 and first.is_complete:
        return first.error(first.text)
    if len(failed) == len(calls) and len(set(failures)) == 1:
        return first.error(f'{first.text}\n  ({first.operation} failed on all ranks)')
    lines = [(f'{failure.kind.__name__}: {failure.text}', '<- failed') if failure
             else (str(call), '') for call, failure in zip(calls, failures, strict=True)]
    return first.error('\n'.join([f'{first.operation} failed on {ranks_text(failed)} '
                                  f'({first.consequence})', *_table(lines)]))


def calls_differ_error(calls: Sequence[object]) -> Exception:
    """Return the error to raise if the arguments of create_communicator differ between ranks."""
    usual = Counter(calls).most_common(1)[0][0]
    return CollectiveMismatchError.of('\n'.join([
        'Collective mismatch in create_communicator: arguments differ between ranks',
        *_table([(str(call), '' if call == usual else '<- differs') for call in calls]),
        'Pass the same arguments on all ranks.']), calls)


def _have_different_options(callers: Sequence[Caller], signatures: Sequence[CallSignature]
                            ) -> bool:
    if not callers[0].name or len({caller.name for caller in callers}) > 1:
        return False
    if len({signature.update for signature in signatures}) > 1:  # then their states differ as well
        return len({caller.options_digest for caller in callers}) > 1
    return len({caller.digest for caller in callers}) > 1


def _usual(signatures: Sequence[CallSignature]) -> CallSignature:
    """Return the most frequent call; in case of a tie, the call of the lowest rank."""
    operation = Counter(signature.operation for signature in signatures).most_common(1)[0][0]
    same = [signature for signature in signatures if signature.operation == operation]
    equal = same[0].declared.equal
    key = Counter(signature.key(equal) for signature in same).most_common(1)[0][0]
    return next(signature for signature in same if signature.key(equal) == key)


def _difference(signature: CallSignature, usual: CallSignature) -> str:
    """Return the name of the first difference between a call and the usual one, or ''."""
    equal = usual.declared.equal or CALL
    if signature.operation != usual.operation:
        return 'operations'
    if signature.key(CALL) != usual.key(CALL):
        return ('updates' if signature.update != usual.update else
                'callers' if signature.caller != usual.caller else
                'roots' if signature.root != usual.root else 'ops')
    if equal >= DTYPE and signature.code != usual.code:
        return 'dtypes'
    if equal >= SHAPE and signature.key(SHAPE) != usual.key(SHAPE):
        return usual.declared.digest_of or 'shapes'
    return ''


def _table(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each group of ranks with the same text; fewer groups if texts are long."""
    longest = max(text.count('\n') + 1 for text, _ in lines)
    shown, more = select_groups(
        group_ranks(enumerate(lines)), max(2, min(_MAX_GROUPS, _MAX_LINES // longest)))
    width = max(len(text.splitlines()[-1]) for (text, _), _ in shown if text)
    return [f'  {ranks_text(ranks)}: {text:<{width if mark else 0}}   {mark}'.rstrip()
            for (text, mark), ranks in shown] + [f'  {more}'] * bool(more)


def differing(details: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the sorted names whose values differ; ``details`` has one mapping per rank."""
    names = sorted(set().union(*details))
    return [name for name in names if len({detail.get(name) for detail in details}) > 1]


def difference_table(details: Sequence[Mapping[str, str]], missing: str = 'nothing') -> list[str]:
    """Return a line for each name whose value differs between ranks.

    Args:
        details: The values by name, for each rank.
        missing: The text for ranks that do not have the name.
    """
    lines = []
    for path in (paths := differing(details))[:_MAX_PARAMETERS]:
        shown, more = select_groups(
            group_ranks(enumerate(detail.get(path, missing) for detail in details)), _MAX_VALUES)
        lines.append(f'  {path}: ' + '; '.join(
            [f'{text} on {ranks_text(ranks)}' for text, ranks in shown] + [more] * bool(more)))
    if len(paths) > _MAX_PARAMETERS:
        lines.append(f'  and {len(paths) - _MAX_PARAMETERS} more')
    return lines
