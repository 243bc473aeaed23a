"""The stages of a pipeline: the links of a model on all ranks, and the edges between them.

All ranks compute the same stages from the same list, so they raise the same errors.
"""
from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias


class ListedLink(NamedTuple):
    """A link of a MultiNodeChainList on one rank."""

    name: str  # for error messages
    ranks_in: Sequence[int] | None
    ranks_out: Sequence[int] | None


class Edge(NamedTuple):
    """An output that one stage sends to another."""

    number: int
    source: int  # number of the stage
    dest: int


class Stage(NamedTuple):
    """A link and its position in the pipeline of all ranks."""

    number: int  # larger than those of the stages on which it depends
    rank: int
    position: int  # on its rank
    name: str
    edges_in: tuple[Edge, ...]  # in the order of the arguments
    edges_out: tuple[Edge, ...]
    has_inputs: bool  # whether the stage gets the inputs of the model
    has_output: bool
    height: int  # number of stages on the longest path from here to the output

    def step_text(self, micro_batch: int, is_forward: bool) -> str:
        """Describe a step for error messages."""
        return (f'the {"forward" if is_forward else "backward"} step of stage {self.number}, '
                f'micro-batch {micro_batch} of Pipeline ({self.name})')


#: A rank and the index of a link on it.
_Link: TypeAlias = tuple[int, int]


def connect(parts: Sequence[Sequence[ListedLink]]) -> tuple[Stage, ...]:
    """Return the stages, each after the stages on which it depends.

    As in :class:`MultiNodeChainList`, messages between two ranks are received in the order in which
    they are sent.

    Args:
        parts: The links of each rank.

    Raises:
        ValueError: If there are no links, an output is not received, an input is not sent, or
            links wait for each other.
    """
    links = [(rank, index) for rank, local in enumerate(parts) for index in range(len(local))]
    sent: dict[tuple[int, int], list[_Link]] = collections.defaultdict(list)  # by pair of ranks
    if not links:
        raise ValueError('Pipeline: the MultiNodeChainList has no links on any rank. Call '
                         'add_link(link, rank_in, rank_out) on each rank first.')
    for link in links:
        for other in _part(parts, link).ranks_out or ():
            sent[link[0], other].append(link)
    sources: dict[_Link, list[_Link]] = {}
    for link in links:
        rank = link[0]
        sources[link] = []
        for other in _part(parts, link).ranks_in or ():
            if not sent[other, rank]:
                raise ValueError(
                    f'Pipeline: {_part(parts, link).name} on rank {rank} receives from rank '
                    f'{other}, but no link on rank {other} sends to rank {rank}. Add a link with '
                    f'rank_out={rank} on rank {other}.')
            sources[link].append(sent[other, rank].pop(0))
    for (rank, other), left in sorted(sent.items()):
        if left:
            raise ValueError(
                f'Pipeline: {_part(parts, left[0]).name} on rank {rank} sends to rank {other}, but '
                f'no link on rank {other} receives from rank {rank}. Add a link with '
                f'rank_in={rank} on rank {other}.')
    return _stages(parts, _sorted(parts, sources), sources)


def _part(parts: Sequence[Sequence[ListedLink]], link: _Link) -> ListedLink:
    rank, index = link
    return parts[rank][index]


def _sorted(parts: Sequence[Sequence[ListedLink]], sources: Mapping[_Link, Sequence[_Link]]
            ) -> list[_Link]:
    """Return the links, each after its sources."""
    found: dict[_Link, None] = {}
    while len(found) < len(sources):
        ready = [link for link, others in sources.items()
                 if link not in found and all(other in found for other in others)]
        if not ready:
            raise ValueError(_cycle(parts, {link: [other for other in others if other not in found]
                                            for link, others in sources.items()
                                            if link not in found}))
        found.update(dict.fromkeys(ready))
    return [*found]


def _cycle(parts: Sequence[Sequence[ListedLink]], waits: Mapping[_Link, Sequence[_Link]]) -> str:
    """Describe links that wait for each other."""
    path = [next(iter(waits))]
    while path.count(path[-1]) < 2:
        path.append(waits[path[-1]][0])
    links = path[path.index(path[-1]):-1]
    return '\n'.join([
        'Pipeline: links wait for each other, so the model cannot run.',
        *(f'  rank {link[0]}: {_part(parts, link).name} needs the output of link {other[1]} on '
          f'rank {other[0]}' for link, other in zip(links, [*links[1:], links[0]], strict=True)),
        'Change rank_in or rank_out of one of these links.'])


def _stages(parts: Sequence[Sequence[ListedLink]], links: Sequence[_Link],
            sources: Mapping[_Link, Sequence[_Link]]) -> tuple[Stage, ...]:
    numbers = {link: number for number, link in enumerate(links)}
    edges: list[Edge] = []
    for link in links:
        for source in sources[link]:
            edges.append(Edge(len(edges), numbers[source], numbers[link]))
    heights: dict[int, int] = {}
    for number in reversed(range(len(links))):
        heights[number] = 1 + max(
            (heights[edge.dest] for edge in edges if edge.source == number), default=0)
    return tuple(
        Stage(number, *link, _part(parts, link).name,
              tuple(edge for edge in edges if edge.dest == number),
              tuple(edge for edge in edges if edge.source == number),
              _part(parts, link).ranks_in is None, _part(parts, link).ranks_out is None,
              heights[number])
        for link, number in numbers.items())
