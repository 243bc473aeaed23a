"""The report of a hang: the state of each rank; ranks in the same state share a line."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from chainermn._diagnostics import flight_recorder, thread_state
from chainermn._diagnostics.deadlocks.rank_progress import Progress
from chainermn._diagnostics.thread_state import ThreadState
from chainermn._failures.ranks import group_ranks, ranks_text

#: The number of different stacks shown.
_STACKS = 8


class Response(NamedTuple):
    """The response of a rank to an alarm or a question: its state."""

    reason: str  # for raising the alarm; '' if another rank raised it
    threads: list[tuple[ThreadState, float]]  # and seconds in this state; the main thread first
    operations: str  # the flight record
    stacks: str
    progress: Progress

    @classmethod
    def of(cls, reason: str, states: Mapping[int, tuple[ThreadState, float]]) -> Response:
        operations = []
        for calls in flight_recorder.everything():
            if recorded := calls.recorded():
                operations.append(f'{calls.name}: {flight_recorder.summary(recorded)}')
        threads = sorted(states.values(), key=lambda each: each[0].thread)
        return cls(reason, threads, '\n'.join(operations), thread_state.stacks(),
                   Progress.own())

    @property
    def state(self) -> str:
        """The state in words, equal on ranks in the same state."""
        return '; and '.join(
            state.text for state, _ in self.threads if state.operation or not state.thread)


def text(responses: Mapping[int, Response], ranks: Sequence[int], is_first: bool = False,
         hosts: Sequence[str] = ()) -> str:
    """Return the report.

    Args:
        responses: Responses by rank.
        ranks: Ranks that were asked to respond.
        is_first: Whether the ranks have no communicator yet.
        hosts: The host of each of ``ranks``, if known.
    """
    lines = []
    for state, group in _grouped(responses, lambda response: response.state):
        seconds = [seconds for rank in group for _, seconds in responses[rank].threads[:1]]
        lines.append(f'  {ranks_text(group)} {"is" if len(group) == 1 else "are"} {state} '
                     f'(for {_range(seconds)} s)')
    lines += _silent(responses, ranks, hosts or [''] * len(ranks))
    if is_first:
        lines.append('  the state of the others is unknown until all have created a communicator; '
                     'does each of them call create_communicator?')
    lines.append('Last operations:')
    for operations, group in _grouped(responses, lambda response: response.operations):
        lines += [f'  {ranks_text(group)}, {line}' for line in operations.splitlines()]
    for stacks, group in _grouped(responses, lambda response: response.stacks)[:_STACKS]:
        lines.append(f'Stacks of {ranks_text(group)} (most recent call last):\n{stacks}')
    return '\n'.join(lines) + '\n'


def _silent(responses: Mapping[int, Response], ranks: Sequence[int], hosts: Sequence[str]
            ) -> list[str]:
    """Return lines for the ranks that do not answer: those of a host where none does, and others.

    A host may be lost unless a rank answers on it; this rank does.
    """
    reached = {host for rank, host in zip(ranks, hosts, strict=True) if rank in responses}
    silent = group_ranks((rank, '' if host in reached else host)
                         for rank, host in zip(ranks, hosts, strict=True) if rank not in responses)
    lines = []
    for host, group in silent.items():
        one = len(group) == 1
        who = f'{ranks_text(group)} on {host}' if host else ranks_text(group)
        why = "stopped, or in code that holds the GIL"
        if host:
            why = f'host {host} may be unreachable, or {"it is" if one else "they are"} {why}'
        lines.append(f'  {who} {"does" if one else "do"} not answer: {why}')
    return lines


def _grouped(responses: Mapping[int, Response], key: Callable[[Response], str]
             ) -> list[tuple[str, list[int]]]:
    """Group ranks by a part of their responses."""
    return [*group_ranks((rank, key(responses[rank])) for rank in sorted(responses)).items()]


def _range(seconds: Sequence[float]) -> str:
    low, high = f'{min(seconds, default=0):.0f}', f'{max(seconds, default=0):.0f}'
    return low if low == high else f'{low}-{high}'
