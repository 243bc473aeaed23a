"""Warns if ranks have waited for a long time for a rank that is not in an operation."""
from __future__ import annotations

from collections.abc import Mapping

from chainermn._diagnostics.deadlocks.rank_state import RankState
from chainermn._diagnostics.deadlocks.wait_graph import WaitGraph
from chainermn._diagnostics.hang_report import Response
from chainermn._operations.ranks import group_texts, ranks_text
from chainermn._process import environment

#: The default waiting time in seconds; the environment variable overrides it.
DEFAULT = 60.

_HOW_TO_SET = f'({environment.STALL_WARNING} sets the seconds, 0 disables this warning)'


def text(waiting: Mapping[int, RankState], responses: Mapping[int, Response], seconds: float
         ) -> str:
    """Return the warning; '' if all ranks that the others wait for have resumed.

    Args:
        waiting: The states of the waiting ranks.
        responses: The responses of the ranks that responded in time.
        seconds: The minimum number of seconds that the ranks have waited.
    """
    states = {rank: RankState(response.progress, (), False, False)
              for rank, response in responses.items()} | dict(waiting)
    graph, known = WaitGraph(states), set(states)
    running = graph.awaited_by(waiting, known) - set(waiting)
    if not running:
        return ''
    lines = []
    shown, more = group_texts(
        (rank, thread.wait_text, thread.wait_outline)
        for rank, state in sorted(waiting.items()) for thread in state.threads)
    for where, ranks in shown:
        if awaited := graph.awaited_by(ranks, known):
            lines.append(f'  {ranks_text(ranks)} {"waits" if len(ranks) == 1 else "wait"} {where} '
                         f'for {ranks_text(sorted(awaited))}')
    lines += [f'  {more}'] * bool(more)
    shown, more = group_texts((rank, responses[rank].state, responses[rank].outline)
                              for rank in sorted(running))
    for state, ranks in shown:
        lines.append(f'  {ranks_text(ranks)} {"is" if len(ranks) == 1 else "are"} {state}')
    lines += [f'  {more}'] * bool(more)
    return '\n'.join([
        f'chainermn: warning: ranks have waited for {seconds:.0f} s; the job continues '
        f'{_HOW_TO_SET}', *lines]) + '\n'


def creation_text(rank: int, where: str, seconds: float) -> str:
    """Return the warning of a rank that waits in its first create_communicator.

    The state of the other ranks is unknown, because the watchdogs are not connected yet.

    Args:
        rank: The rank.
        where: The end of the sentence, with the place in the script.
        seconds: The minimum number of seconds that the rank has waited.
    """
    return (f'chainermn: warning: rank {rank} has waited for {seconds:g} s {where}; does '
            f'every rank call create_communicator? The job continues {_HOW_TO_SET}\n')
