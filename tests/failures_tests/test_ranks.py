"""Rank numbers in words."""

import pytest

from chainermn._failures.ranks import group_ranks, ranks_text

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
