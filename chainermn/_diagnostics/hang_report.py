"""The report of a hang: the state of each rank. Ranks in the same state share a line.

The report is short for any number of ranks. The reader looks for ranks that differ from the others,
so small groups of ranks come first.
"""
from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from chainermn._diagnostics import flight_recorder, thread_state
from chainermn._diagnostics.deadlocks.rank_state import Progress, ThreadState
from chainermn._operations.ranks import group_ranks, group_texts, ranks_text, select_groups


class _Limits(NamedTuple):
    groups: int  # groups of ranks in the same state
    operations: int  # lines about operations
    stacks: int
    lines: int  # lines of the report
    columns: int  # width of the lines of operations


#: With up to this many ranks, the report shows complete stacks.
_FEW_RANKS = 16
_FEW = _Limits(_FEW_RANKS, 100, 8, 10000, 10000)
_MANY = _Limits(8, 8, 3, 38, 180)  # in addition to the lines of the reason


class Response(NamedTuple):
    """The response of a rank to an alarm or a request: its state."""

    reason: str  # the reason for the alarm; '' if another rank raised it
    threads: list[tuple[ThreadState, float]]  # states and seconds in them; the main thread first
    operations: bytes  # the flight record, compressed
    stacks: bytes  # compressed
    progress: Progress

    @classmethod
    def of(cls, reason: str, states: Mapping[int, tuple[ThreadState, float]]) -> Response:
        operations = []
        for record in flight_recorder.all_records():
            if record.ring:
                operations.append(f'{record.name}: {flight_recorder.summary([*record.ring])}')
        threads = sorted(states.values(), key=lambda each: each[0].thread)
        return cls(reason, threads, compressed('\n'.join(operations)),
                   compressed(thread_state.stacks()), Progress.of_this_rank())

    @property
    def state(self) -> str:
        """The state as text, the same on all ranks in the same state."""
        return self._join(lambda state: state.text)

    @property
    def outline(self) -> str:
        """The state without arguments and peers."""
        return self._join(lambda state: state.outline)

    def _join(self, text: Callable[[ThreadState], str]) -> str:
        return '; and '.join(
            text(state) for state, _ in self.threads if state.operation or not state.thread)


def compressed(text: str) -> bytes:
    """Compress a text of a response, because each reporter receives the texts of all ranks."""
    return zlib.compress(text.encode(errors='replace'))


def text(responses: Mapping[int, Response], ranks: Sequence[int], is_creating: bool = False,
         hosts: Sequence[str] = ()) -> str:
    """Return the report.

    Args:
        responses: The responses, by rank.
        ranks: The ranks that were asked to respond.
        is_creating: Whether the ranks are still creating their first communicator.
        hosts: The hosts of ``ranks``, if known.
    """
    responses = dict(sorted(responses.items()))
    limits = _FEW if max(len(ranks), len(responses)) <= _FEW_RANKS else _MANY
    lines = _states(responses, limits)
    lines += _silent(responses, ranks, hosts or [''] * len(ranks), limits.groups // 2)
    if is_creating:
        lines.append('  the state of the other ranks is unknown until all ranks have created a '
                     'communicator; does each of them call create_communicator?')
    lines.append('Last operations:')
    lines += _operations(responses, limits)
    lines += _stacks(responses, limits, limits.lines - len(lines))
    return '\n'.join(lines) + '\n'


def _states(responses: Mapping[int, Response], limits: _Limits) -> list[str]:
    shown, more = group_texts(
        ((rank, each.state, each.outline) for rank, each in responses.items()), limits.groups)
    lines = []
    for state, group in sorted(shown, key=_size):
        seconds = [seconds for rank in group for _, seconds in responses[rank].threads[:1]]
        lines.append(f'  {ranks_text(group)} {"is" if len(group) == 1 else "are"} {state} '
                     f'(for {_range(seconds)} s)')
    return lines + [f'  {more}'] * bool(more)


def _silent(responses: Mapping[int, Response], ranks: Sequence[int], hosts: Sequence[str],
            limit: int) -> list[str]:
    """Return lines for the ranks that do not respond, by host if no rank of the host responds.

    Such a host may be lost.
    """
    reached = {host for rank, host in zip(ranks, hosts, strict=True) if rank in responses}
    silent = group_ranks((rank, '' if host in reached else host)
                         for rank, host in zip(ranks, hosts, strict=True) if rank not in responses)
    shown, more = select_groups(silent, limit)
    lines = []
    for host, group in shown:
        one = len(group) == 1
        who = f'{ranks_text(group)} on {host}' if host else ranks_text(group)
        why = 'the rank is stopped, or runs code that holds the GIL' if one else (
            'the ranks are stopped, or run code that holds the GIL')
        if host:
            why = f'host {host} may be unreachable, or {why}'
        lines.append(f'  {who} {"does" if one else "do"} not respond: {why}')
    return lines + [f'  {more}'] * bool(more)


def _operations(responses: Mapping[int, Response], limits: _Limits) -> list[str]:
    """Return a line with the newest calls for each record; ranks with the same calls share it."""
    groups: dict[str, list[int]] = {}  # ranks by line
    for texts, ranks in group_ranks(
            (rank, each.operations) for rank, each in responses.items()).items():
        for line in _decompressed(texts).splitlines():
            groups.setdefault(line, []).extend(ranks)
    shown, more = select_groups(
        {line: sorted(group) for line, group in groups.items()}, limits.operations)
    return [_newest(f'  {ranks_text(group)}, {line}', limits.columns)
            for line, group in sorted(shown, key=_size)] + [f'  {more}'] * bool(more)


def _newest(line: str, columns: int) -> str:
    """Remove the oldest calls of a line that is too long."""
    first, *calls = line.split('; ')
    name, _, _ = first.partition(': ')
    while calls and len(line) > columns:
        line = f'{name}: ...; {"; ".join(calls)}'
        del calls[0]
    return line


def _stacks(responses: Mapping[int, Response], limits: _Limits, n_lines: int) -> list[str]:
    """Return a stack for each group of ranks in the same functions, with up to ``n_lines`` lines.

    With few ranks, stacks are complete.
    """
    groups: dict[str, list[int]] = {}  # ranks by functions
    representative: dict[str, str] = {}
    for stacks, ranks in group_ranks(
            (rank, each.stacks) for rank, each in responses.items()).items():
        text = _decompressed(stacks)
        functions = re.sub(r'line \d+, in |^    .*\n?', '', text, flags=re.MULTILINE)
        representative.setdefault(functions, text)
        groups.setdefault(functions, []).extend(ranks)
    shown, more = select_groups(groups, max(1, min(limits.stacks, (n_lines - 1) // 6)))
    lines = []
    for functions, group in sorted(shown, key=_size):
        stack = representative[functions].splitlines()
        if limits is _MANY:
            stack = _innermost(stack, (n_lines - 1) // len(shown) - 1)
        first = f'; of rank {min(group)}' if len(group) > 1 else ''
        lines += [f'Stacks of {ranks_text(sorted(group))} (most recent call last{first}):', *stack]
    return lines + [more] * bool(more)


def _innermost(stack: Sequence[str], n_lines: int) -> list[str]:
    """Return the innermost frames of the first thread (at least one) and its operation."""
    frames: list[list[str]] = []
    for line in stack[1:]:
        if line.startswith('Thread '):
            break
        if line.startswith(('  File ', '  in ')) or not frames:
            frames.append([])
        frames[-1].append(line)
    shown = [*frames]
    while len(shown) > 1 and sum(map(len, shown)) > n_lines - 1:
        del shown[0]
    dots = ['  ...'] * (len(shown) < len(frames))
    return dots + [line for frame in shown for line in frame]


def _size(group: tuple[str, Sequence[int]]) -> int:
    return len(group[1])


def _decompressed(data: bytes) -> str:
    return zlib.decompress(data).decode()


def _range(seconds: Sequence[float]) -> str:
    low, high = f'{min(seconds, default=0):.0f}', f'{max(seconds, default=0):.0f}'
    return low if low == high else f'{low}-{high}'
