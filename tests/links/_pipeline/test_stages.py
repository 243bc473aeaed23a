"""How the links of all ranks become stages."""

import pytest

from chainermn.links._pipeline.stages import ListedLink as Part
from chainermn.links._pipeline.stages import connect

pytestmark = pytest.mark.mpi_skip


def test_branches():
    """Rank 0 sends to rank 1 and to itself, and joins both."""
    stages = connect([[Part('a', None, [0, 1]), Part('b', [0], [0]), Part('d', [1, 0], None)],
                      [Part('c', [0], [0])]])
    assert [(stage.name, stage.rank, stage.height) for stage in stages] == [
        ('a', 0, 3), ('b', 0, 2), ('c', 1, 2), ('d', 0, 1)]
    names = [stage.name for stage in stages]
    assert [[names[edge.source] for edge in stage.edges_in] for stage in stages] == [
        [], ['a'], ['a'], ['c', 'b']]
    assert [[names[edge.dest] for edge in stage.edges_out] for stage in stages] == [
        ['b', 'c'], ['d'], ['d'], []]


def test_messages_between_two_ranks_arrive_in_the_order_sent():
    stages = connect([[Part('a', None, [1]), Part('b', None, [1, 1])],
                      [Part('c', [0, 0, 0], None)]])
    names = [stage.name for stage in stages]
    assert [names[edge.source] for edge in stages[-1].edges_in] == ['a', 'b', 'b']


@pytest.mark.parametrize('parts, text', [
    ([[Part('a', [1], [1])], [Part('b', [0], [0])]],
     'Pipeline: links wait for each other, so the model cannot run.\n'
     '  rank 0: a needs the output of link 0 on rank 1\n'
     '  rank 1: b needs the output of link 0 on rank 0\n'),
    ([[Part('a', [0], [0])]], '  rank 0: a needs the output of link 0 on rank 0\n'),
    ([[Part('a', None, [1])], []],
     'a on rank 0 sends to rank 1, but no link on rank 1 receives from rank 0'),
    ([[], [Part('a', [0], None)]],
     'a on rank 1 receives from rank 0, but no link on rank 0 sends to rank 1'),
    ([[Part('a', None, [1]), Part('x', None, [1])], [Part('b', [0], None)]],
     'x on rank 0 sends to rank 1')])
def test_wrong_lists(parts, text):
    with pytest.raises(ValueError) as caught:
        connect(parts)
    assert text in str(caught.value)
