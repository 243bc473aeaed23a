"""Every element belongs to one rank, and the ranks have about the same number of elements."""

import hypothesis
import pytest
from hypothesis import strategies as st

from chainermn.optimizers._sharded_states.partition import Item, partition

pytestmark = pytest.mark.mpi_skip

ITEMS = st.lists(st.tuples(st.integers(0, 3000), st.booleans(), st.booleans()), max_size=12)


@hypothesis.given(ITEMS, st.integers(1, 9))
@hypothesis.settings(deadline=None, max_examples=50)
def test_each_element_belongs_to_one_rank(sizes, n):
    items = [Item(f'/{i}', *item) for i, item in enumerate(sizes)]
    shards = partition(items, n)
    assert len(shards) == n
    for path, size, is_divisible, *_ in items:
        ranges = sorted(shard[path] for shard in shards if path in shard)
        elements = [element for begin, end in ranges for element in range(begin, end)]
        assert elements == list(range(size))
        assert is_divisible or len(ranges) <= 1


@hypothesis.given(st.lists(st.integers(0, 5000), max_size=12), st.integers(1, 9))
@hypothesis.settings(deadline=None, max_examples=50)
def test_divisible_parameters_are_balanced(sizes, n):
    shards = partition([Item(f'/{i}', size, True, True) for i, size in enumerate(sizes)], n)
    loads = [sum(end - begin for begin, end in shard.values()) for shard in shards]
    assert max(loads) - min(loads) <= 2 * 64  # parameters are split at multiples of 64


def test_divisible_parameters_fill_up_what_indivisible_ones_leave():
    items = [Item('/large', 6400, False, True), Item('/small', 640, False, True),
             Item('/rest', 12160, True, True)]
    shards = partition(items, 3)
    assert [sum(end - begin for begin, end in shard.values()) for shard in shards] == [6400] * 3
    assert shards[0] == {'/large': (0, 6400)}


def test_disabled_parameters_are_balanced_among_themselves():
    items = [Item('/frozen', 12800, True, False), Item('/trained', 1280, True, True)]
    shards = partition(items, 2)
    assert [shard['/trained'] for shard in shards] == [(0, 640), (640, 1280)]
    assert [shard['/frozen'] for shard in shards] == [(0, 6400), (6400, 12800)]


def test_parameters_that_share_memory_belong_to_every_rank():
    items = [Item('/a', 640, True, True, True), Item('/b', 64, False, True, True),
             Item('/rest', 1280, True, True)]
    first, second = partition(items, 2)
    assert first == {'/a': (0, 640), '/b': (0, 64), '/rest': (0, 640)}
    assert second == {'/a': (0, 640), '/b': (0, 64), '/rest': (640, 1280)}
