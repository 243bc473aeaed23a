"""Arrays that belong to ranks, dealt to chunks."""

import hypothesis
import hypothesis.strategies as st
import pytest

from chainermn._transport import owned_parts
from chainermn._transport.owned_parts import Part

pytestmark = pytest.mark.mpi_skip


def test_each_chunk_has_the_same_share_of_each_rank():
    chunks = owned_parts.dealt((6, 4, 2), (0, 1, 1), (0, 1), 6)
    assert chunks == [
        [[Part(0, 0, 2)], [Part(1, 0, 2)]],
        [[Part(0, 2, 4)], [Part(1, 2, 4)]],
        [[Part(0, 4, 6)], [Part(2, 0, 2)]]]


@hypothesis.given(arrays=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 4))),
                  nodes=st.lists(st.integers(0, 2), min_size=5, max_size=5),
                  length=st.integers(30, 3000))
def test_all_elements_in_chunks_with_room(arrays, nodes, length):
    nodes = tuple([sorted({*nodes}).index(node) for node in nodes])
    n_nodes = len({*nodes})
    assert owned_parts.fits(nodes, length)
    found = [[] for _ in arrays]
    for parts in owned_parts.dealt(
            tuple(size for size, _ in arrays), tuple(owner for _, owner in arrays), nodes, length):
        assert len(parts) == len(nodes)
        for node in range(n_nodes):
            assert sum(part.stop - part.start for of_rank, its in zip(parts, nodes, strict=True)
                       if its == node for part in of_rank) <= length // n_nodes
        for rank, of_rank in enumerate(parts):
            for part in of_rank:
                assert arrays[part.array][1] == rank
                found[part.array] += range(part.start, part.stop)
    assert found == [[*range(size)] for size, _ in arrays]


def test_parts_are_aligned_in_chunks_with_room():
    chunks = owned_parts.dealt((100_000, 100_000), (0, 1), (0, 1), 10_000)
    assert {part.start % 64 for chunk in chunks for parts in chunk for part in parts} == {0}


def test_a_chunk_without_room_for_a_part_of_each_rank():
    assert owned_parts.fits((0, 0, 1), 8)
    assert not owned_parts.fits((0, 0, 1), 7)
