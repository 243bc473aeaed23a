"""Rank numbers in words."""

import pytest

from chainermn._operations.ranks import (
    group_lines,
    group_ranks,
    group_texts,
    ranks_text,
    select_groups,
)

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize('ranks, text', [
    ([3], 'rank 3'), ([0, 1], 'ranks 0-1'), ([0, 2], 'ranks 0, 2'), ([0, 1, 2, 5], 'ranks 0-2, 5'),
    ([1, 3, 4, 6, 8, 9, 10], 'ranks 1, 3-4, 6, 8-10'), (range(1000), 'ranks 0-999'),
])
def test_ranks_text(ranks, text):
    assert ranks_text(list(ranks)) == text


def test_group_ranks():
    assert group_ranks(enumerate('abab')) == {'a': [0, 2], 'b': [1, 3]}
    assert [*group_ranks([(5, 'x'), (2, 'y'), (1, 'x')]).items()] == [('x', [5, 1]), ('y', [2])]
    assert group_ranks([]) == {}


def test_many_ranges_are_abbreviated():
    assert ranks_text([*range(0, 1024, 2)]) == (
        'ranks 0, 2, 4, 6, 8, 10, ..., 1022 (512 ranks)')
    assert ranks_text([*range(0, 16, 2)]) == 'ranks 0, 2, 4, 6, 8, 10, 12, 14'
    assert ranks_text([*range(0, 16, 2), *range(20, 30)]) == (
        'ranks 0, 2, 4, 6, 8, 10, ..., 20-29 (18 ranks)')


def test_the_smallest_and_the_largest_groups_are_selected():
    groups = {size: [*range(100 * size, 101 * size)] for size in (5, 2, 4, 1, 3)}
    assert select_groups(groups, 5) == ([*groups.items()], '')
    shown, more = select_groups(groups, 3)
    assert [size for size, _ in shown] == [1, 2, 5]
    assert more == '... and 2 more groups (7 ranks)'


def test_too_many_groups_are_merged_by_their_outlines():
    texts = [(rank, f'receives from {rank + 1}', 'receives') for rank in range(3)]
    assert group_texts(texts, 3)[0] == [
        ('receives from 1', [0]), ('receives from 2', [1]), ('receives from 3', [2])]
    assert group_texts(texts, 2) == ([('receives', [0, 1, 2])], '')


def test_group_lines():
    assert group_lines(enumerate('aba')) == ['  ranks 0, 2: a', '  rank 1: b']
    lines = group_lines(enumerate(range(1000)))
    assert len(lines) == 13 and lines[-1] == '  ... and 988 more groups (988 ranks)'
