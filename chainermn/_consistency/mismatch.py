"""The error that all ranks raise when they do not agree: what each called, and what to do."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from chainermn._ranks import ranks_text
from chainermn._signature import CALL, DTYPE, END, EQUAL, SHAPE, Header

_MAX_PARAMETERS = 10
#: Operations whose header has a digest of more than it can hold, and of what.
_DETAILED = {'bcast_data': 'parameters', 'multi_node_mean_grad': 'parameters',
             'allreduce_many': 'arrays', 'reduce_scatter': 'arrays', 'new_group': 'ranks'}

_ADVICE = {
    'end': 'A rank has come to the end of the program while others make a collective call; look '
           'for loops of different lengths, or for a call inside an "if" on the rank.',
    'verbs': 'All ranks have to make the same collective calls in the same order; look for a call '
             'inside an "if" on the rank, or for loops of different lengths.',
    'join': 'A rank that has run out of inputs inside chainermn.join takes part in the updates of '
            'its optimizer, but in no other collective call (such as those of '
            'MultiNodeBatchNormalization, an evaluator, a checkpointer or an '
            'ObservationAggregator). Give all ranks as many inputs, or enter join with '
            'throw_on_early_termination=True, or make these calls after it.',
    'updates': 'An update raised an error on a rank, and the program went on with the next one '
               'there. Let the error end the program, or let that rank take part without gradients '
               'of its own: model.cleargrads(); optimizer.update(). To go on after this error, '
               'load a checkpoint on all ranks.',
    'roots': 'Pass the same root on all ranks.',
    'operations': 'Pass the same op on all ranks.',
    'dtypes': 'Cast before the call, e.g. x.astype(numpy.float32).',
    'shapes': 'Make the shapes equal before the call; gather and allgather take different ones.',
    'bcast_data': 'All ranks need the same model, with the same parameters initialized.',
    'multi_node_mean_grad': 'All ranks need the same model with gradients for the same parameters; '
                            'with zero_fill=True a missing gradient counts as zero.  Compression '
                            'has to be the same as well.',
    'allreduce_many': 'Pass as many arrays, of the same dtypes and shapes, on all ranks.',
    'reduce_scatter': 'Each rank passes one array for each rank; those meant for one rank have to '
                      'be of one shape, and all of one dtype.',
    'new_group': 'Pass the same ranks, in the same order, on all ranks.',
}


class CollectiveMismatchError(ValueError):
    """Ranks called different operations, or one operation with arguments that do not match.

    All ranks raise it, with the same text, before any data is sent.

    Attributes:
        calls: The call of each rank, as text, by rank.
        call_sites: Where each rank made it, such as ``train.py:8``, by rank; ``''`` where that is
            not known.
    """

    calls: tuple[str, ...] = ()
    call_sites: tuple[str, ...] = ()

    @classmethod
    def of(cls, message: str, calls: Sequence[object], sites: Sequence[str] = ()
           ) -> CollectiveMismatchError:
        error = cls(message)
        error.calls = tuple(map(str, calls))
        error.call_sites = tuple(site.rpartition('called at ')[2] for site in sites) or (
            ('',) * len(calls))
        return error


CollectiveMismatchError.__module__ = 'chainermn'  # where users find it


class Refusal(NamedTuple):
    """Why a rank refused its arguments, in a form that every rank can unpickle."""

    verb: str
    kind: type[Exception]
    text: str

    @classmethod
    def of(cls, verb: str, error: Exception) -> Refusal:
        kind = next(kind for kind in type(error).__mro__
                    if kind.__module__.partition('.')[0] in ('builtins', 'chainermn', '_pickle'))
        return cls(verb, kind, str(error))

    def error(self, message: str) -> Exception:
        """An error of the refused kind, or of its nearest base that takes just a message."""
        for kind in self.kind.__mro__:
            try:
                return _KeyError(message) if kind is KeyError else kind(message)
            except TypeError:
                continue
        return RuntimeError(message)


class _KeyError(KeyError):
    """A KeyError that shows its message as text; Python shows the repr of a key."""

    __str__ = Exception.__str__


def common_error(headers: Sequence[Header], refusals: Sequence[Refusal | None],
                 details: Sequence[dict[str, str] | None], sites: Sequence[str] = ()) -> Exception:
    """Builds the error from facts that all ranks have, so that it is equal on all of them.

    Args:
        headers: What each rank called.
        refusals: Why it refused that, if it did.
        details: What its header's number is a digest of.
        sites: Where it called that; not shown if all did at the same place.
    """
    every_site = sites
    if len(set(sites)) <= 1:
        sites = [''] * len(headers)
    if any(refusals):
        return refused_error([f'{header}{site}' for header, site in zip(
            headers, sites, strict=True)], refusals)
    usual = _usual(headers)
    differences = [_difference(header, usual) for header in headers]
    what = next(difference for difference in differences if difference)
    if what == 'verbs':
        title = 'the ranks called different verbs'
    else:
        title = f'{usual.verb} refused: {what} differ between the ranks'
    lines = [(f'{header}{"" if header.verb == END else site}',
              f'<- {difference} differ' if difference else '')
             for header, difference, site in zip(headers, differences, sites, strict=True)]
    if what == _DETAILED.get(usual.verb) and all(detail is not None for detail in details):
        table = _parameter_table([detail or {} for detail in details])
    else:
        table = _table(lines)
    if any(header.verb == END for header in headers):
        what = 'end'
    elif what == 'verbs' and any(header.verb == 'join' for header in headers):
        what = 'join'
    advice = _ADVICE[usual.verb if what == _DETAILED.get(usual.verb) else what]
    return CollectiveMismatchError.of(
        '\n'.join([f'{title}; no data was exchanged', *table, advice]), headers, every_site)


def refused_error(calls: Sequence[object], refusals: Sequence[Refusal | None]) -> Exception:
    """The error when some ranks refused their arguments; ``calls`` shows the others'."""
    refused = [rank for rank, refusal in enumerate(refusals) if refusal]
    first = refusals[refused[0]]
    assert first is not None
    if len(refused) == len(calls) and len(set(refusals)) == 1:
        return first.error(f'{first.text}\n  ({first.verb} was refused on all ranks)')
    lines = [(f'{refusal.kind.__name__}: {refusal.text}', '<- refused') if refusal
             else (str(call), '') for call, refusal in zip(calls, refusals, strict=True)]
    return first.error('\n'.join([f'{first.verb} refused on {ranks_text(refused)}; no data was '
                                  'exchanged', *_table(lines)]))


def calls_differ_error(verb: str, calls: Sequence[object]) -> Exception:
    """The error when a call is not the same on all ranks."""
    usual = Counter(calls).most_common(1)[0][0]
    return CollectiveMismatchError.of('\n'.join([
        f'{verb} refused: the arguments differ between the ranks',
        *_table([(str(call), '' if call == usual else '<- differs') for call in calls]),
        'Pass the same arguments on all ranks.']), calls)


def _usual(headers: Sequence[Header]) -> Header:
    """The call that most ranks made; of several, the one of the lowest rank."""
    verb = Counter(header.verb for header in headers).most_common(1)[0][0]
    same = [header for header in headers if header.verb == verb]
    key = Counter(header.key(EQUAL[verb]) for header in same).most_common(1)[0][0]
    return next(header for header in same if header.key(EQUAL[verb]) == key)


def _difference(header: Header, usual: Header) -> str:
    """Names the first thing in which a call differs from the usual one, or returns ''."""
    equal = EQUAL[usual.verb]
    if header.verb != usual.verb:
        return 'verbs'
    if header.key(CALL) != usual.key(CALL):
        return ('updates' if header.update != usual.update else
                'roots' if header.root != usual.root else 'operations')
    if equal >= DTYPE and header.code != usual.code:
        return 'dtypes'
    if equal >= SHAPE and header.key(SHAPE) != usual.key(SHAPE):
        return _DETAILED.get(usual.verb, 'shapes')
    return ''


def _table(lines: Sequence[tuple[str, str]]) -> list[str]:
    """One line for each run of ranks that say the same."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, line in enumerate(lines):
        groups.setdefault(line, []).append(rank)
    width = max(len(text.splitlines()[-1]) for text, _ in groups if text)
    return [f'  {ranks_text(ranks)}: {text:<{width if mark else 0}}   {mark}'.rstrip()
            for (text, mark), ranks in groups.items()]


def _parameter_table(details: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each parameter that is not the same on all ranks."""
    paths = sorted(set().union(*details))
    differing = [path for path in paths if len({detail.get(path) for detail in details}) > 1]
    lines = []
    for path in differing[:_MAX_PARAMETERS]:
        groups: dict[str, list[int]] = {}
        for rank, detail in enumerate(details):
            groups.setdefault(detail.get(path, 'nothing'), []).append(rank)
        lines.append(f'  {path}: ' + '; '.join(
            f'{text} on {ranks_text(ranks)}' for text, ranks in groups.items()))
    if len(differing) > _MAX_PARAMETERS:
        lines.append(f'  and {len(differing) - _MAX_PARAMETERS} more')
    return lines
