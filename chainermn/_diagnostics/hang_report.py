"""The report of a hang: what each rank is doing, ranks that do the same in one line."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chainermn._diagnostics import flight_recorder, thread_state
from chainermn._diagnostics.thread_state import Doing
from chainermn._ranks import ranks_text

#: How many different stacks are shown.
_STACKS = 8


class Said(NamedTuple):
    """What a rank says of itself."""

    why: str  # it reports, or '' if it was asked to
    doing: list[tuple[Doing, float]]  # and for how many seconds
    recent: str
    stacks: str

    @classmethod
    def of(cls, why: str, doing: Mapping[int, tuple[Doing, float]]) -> Said:
        recent = []
        for calls in flight_recorder.everything():
            if kept := calls.kept():
                recent.append(f'{calls.name}: {flight_recorder.summary(kept)}')
        # The main thread first.
        threads = sorted(doing.values(), key=lambda each: each[0].thread)
        return cls(why, threads, '\n'.join(recent), thread_state.stacks())

    @property
    def text(self) -> str:
        """What it is doing, the same on ranks that do the same."""
        verbs = [doing.text for doing, _ in self.doing if doing.verb or not doing.thread]
        return '; and '.join(verbs)


def text(said: Mapping[int, Said], ranks: Sequence[int], is_first: bool = False) -> str:
    """The report.

    Args:
        said: What ranks said, by rank.
        ranks: Those that were asked.
        is_first: Whether the ranks have no communicator yet.
    """
    groups: dict[str, list[int]] = {}
    for rank in sorted(said):
        groups.setdefault(said[rank].text, []).append(rank)
    lines = []
    for what, those in groups.items():
        since = [seconds for rank in those for _, seconds in said[rank].doing[:1]]
        lines.append(f'  {ranks_text(those)} {_are(those)} {what} (for {_range(since)} s)')
    if silent := [rank for rank in ranks if rank not in said]:
        lines.append(f'  {ranks_text(silent)} {"does" if len(silent) == 1 else "do"} not answer: '
                     "stopped, or in code that holds Python's lock")
    if is_first:
        lines.append('  what the others do is not known before all have made a communicator; does '
                     'each of them call create_communicator?')
    lines.append('Last verbs:')
    recent: dict[str, list[int]] = {}
    for rank in sorted(said):
        recent.setdefault(said[rank].recent, []).append(rank)
    for verbs, those in recent.items():
        lines += [f'  {ranks_text(those)}, {line}' for line in verbs.splitlines()]
    stacks: dict[str, list[int]] = {}
    for rank in sorted(said):
        stacks.setdefault(said[rank].stacks, []).append(rank)
    for stack, those in list(stacks.items())[:_STACKS]:
        lines.append(f'Stacks of {ranks_text(those)} (most recent call last):\n{stack}')
    return '\n'.join(lines) + '\n'


def _are(ranks: Sequence[int]) -> str:
    return 'is' if len(ranks) == 1 else 'are'


def _range(seconds: Sequence[float]) -> str:
    low, high = f'{min(seconds, default=0):.0f}', f'{max(seconds, default=0):.0f}'
    return low if low == high else f'{low}-{high}'
