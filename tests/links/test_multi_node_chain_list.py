"""Models over several ranks against the same model in one process."""

import sys

import chainer
import chainer.functions as F
import numpy as np
import pytest
from each_case import each_case
from jobs import run_job
from models_on_ranks import WIDTH, Doubled, OneProcess, Part, build, chain, compare_gradients
from shared_fixtures import communicators, raises_on_all

from chainermn.links import MultiNodeChainList

pytestmark = pytest.mark.every_size

comm = communicators('naive', 'version7', min_size=2)
X = np.random.RandomState(9).normal(0, 1, (3, WIDTH))


@pytest.fixture(autouse=True)
def float64():
    with chainer.using_config('dtype', np.dtype('d')):
        yield


#: Each output of these is part of the loss.
SEVERAL_OUTPUTS = {
    'no parameters before the output': lambda size: [
        ('a', Doubled, 0, None), ('b', Part, 1, ['a']), ('c', Part, 0, ['b'])],
    'no parameters, and an output of its own': lambda size: [
        ('a', Doubled, 0, None), ('b', Part, 1, ['a']), ('c', Part, 0, None)],
    'two messages to itself': lambda size: [
        ('a', Part, 0, None), ('b', Part, 0, None), ('c', Part, 0, ['a']),
        ('d', Part, 0, ['b', 'c']), ('e', Part, 1, ['d'])],
    'the output before the last part': lambda size: [
        ('a', Part, 1, None), ('b', Part, 0, ['a']), ('c', Part, 0, None), ('d', Part, 1, ['c'])],
}


def check(comm, links):
    """Compare outputs and gradients of the squares with one process."""
    reference = OneProcess(links)
    reference.cleargrads()
    outputs = reference.outputs(X)
    sum(F.sum(y * y) for y in outputs.values()).backward()
    model, own = build(links, comm)
    if not own:
        return
    model.cleargrads()
    y = model(X)
    expected = [outputs[name].array for name in own if name in outputs] or [np.empty(0)]
    np.testing.assert_allclose([y.array], expected, 1e-12)
    (F.sum(y * y) if y.size else y).backward()
    compare_gradients(own, reference)


@each_case('name', SEVERAL_OUTPUTS)
def test_several_outputs(comm, name):
    """Backward runs on all ranks, in the opposite order, also if the first part needs none."""
    check(comm, SEVERAL_OUTPUTS[name](comm.size))


def test_on_split_communicators(comm):
    """Each group of two ranks, in reverse order, has its own model."""
    group = comm.split(comm.rank // 2, -comm.rank)
    check(group, chain(group.size))
    group.finalize()


# --- wrong lists ----------------------------------------------------------------------------------

def test_two_outputs_are_rejected(comm):
    model = MultiNodeChainList(comm)
    model.add_link(Part('a'), rank_in=0)
    with pytest.raises(ValueError, match=r'link 1 \(Part, rank_in=0, rank_out=None\) of MultiNodeCh'
                                         r'ainList is the second link on this rank with rank_out='):
        model.add_link(Part('b'), rank_in=0)


@each_case('ranks', [-1, 99, [0, 99], np.int64(-1)])
def test_ranks_that_do_not_exist_are_rejected(comm, ranks):
    with pytest.raises(ValueError, match=r'link 0 \(Part, .*but ranks are 0 to'):
        MultiNodeChainList(comm).add_link(Part('a'), rank_out=ranks)
    with pytest.raises(ValueError, match=r'link 0 \(Part, .*but ranks are 0 to'):
        MultiNodeChainList(comm).add_link(Part('a'), rank_in=ranks)


def test_an_unused_output_to_itself_is_rejected(comm):
    model = MultiNodeChainList(comm)
    model.add_link(Part('a'), rank_out=comm.rank)
    with pytest.raises(ValueError, match=r'link 0 \(Part, rank_in=None, rank_out=\d\) .*no later'):
        model(X)


def test_a_missing_input_from_itself_is_rejected(comm):
    model = MultiNodeChainList(comm)
    model.add_link(Part('a'), rank_in=comm.rank)
    with pytest.raises(ValueError, match=r'link 0 \(Part, rank_in=\d, rank_out=N.*no earlier'):
        model()


@pytest.mark.compares_calls
@each_case('rank_in, rank_out, text', [
    (None, 0, 'link 1 (Part, rank_in=None, rank_out=0) of MultiNodeChainList on rank 0 sends to'),
    (0, None, 'link 1 (Part, rank_in=0, rank_out=None) of MultiNodeChainList on rank 0 receives')])
def test_a_message_of_one_rank_to_itself_is_an_error_on_all(comm, rank_in, rank_out, text):
    model = MultiNodeChainList(comm)
    if comm.rank == 0:
        model.add_link(Part('a'), rank_out=[])  # its output is not used
        model.add_link(Part('a'), rank_in, rank_out)
    else:
        model.add_link(Part('a'))

    with raises_on_all(ValueError, text) as caught:
        model(X)
        comm.barrier()  # any collective, such as an update of the optimizer
    assert 'chainermn.functions' not in str(caught.value)


PROGRAM = '''
import chainer, chainermn, numpy as np
comm = chainermn.create_communicator('naive')
model = chainermn.MultiNodeChainList(comm)
def link(rank_in=None, rank_out=None):
    model.add_link(chainer.links.Linear(3, 3), rank_in, rank_out)
rank, size = comm.rank, comm.size
ADD
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
for _ in range(2):
    y = model(np.ones((2, 3), 'f'))
    chainer.functions.sum(y).backward()
    optimizer.update()
'''


@pytest.mark.mpi_skip
@pytest.mark.parametrize('add, expected', [
    # Rank 1 lacks rank_in.
    ('link(rank_out=1) if rank == 0 else link()',
     ['link 0 (Linear, rank_in=None, rank_out=1) of MultiNodeChainList, to a link with rank_in=0 '
      'on rank 1']),
    # Rank 0 lacks rank_out.
    pytest.param(
        'link(rank_in=0) if rank == 1 else link()',
        ['link 0 (Linear, rank_in=0, rank_out=None) of MultiNodeChainList, from a link with '
         'rank_out=1 on rank 0'], marks=pytest.mark.slow),
    pytest.param(
        'link(rank_in=(rank - 1) % size, rank_out=(rank + 1) % size)',
        [f'link 0 (Linear, rank_in={(rank - 1) % 3}, rank_out={(rank + 1) % 3}) of '
         f'MultiNodeChainList, from a link with rank_out={rank} on rank {(rank - 1) % 3}'
         for rank in range(3)], marks=pytest.mark.slow),
    # Both send first.
    pytest.param(
        'if rank < 2: link(rank_out=1 - rank)\nlink(rank_in=1 - rank if rank < 2 else None)',
        [f'link 0 (Linear, rank_in=None, rank_out={1 - rank}) of MultiNodeChainList, to a link '
         f'with rank_in={rank} on rank {1 - rank}' for rank in range(2)], marks=pytest.mark.slow),
    # Rank 1 does not run backward.
    pytest.param(
        'link(rank_out=1) if rank == 0 else link(rank_in=0) if rank == 1 else link()\n'
        'if rank == 1: model(), model()',
        ['rank 0 waits in backward of chainermn.functions.send #2 from rank 1 tag 0 of link 0 '
         '(Linear, rank_in=None, rank_out=1) of MultiNodeChainList',
         'rank 1 waits in chainermn.functions.recv #2 from rank 0 tag 0 of link 0 (Linear, '
         'rank_in=0, rank_out=None) of MultiNodeChainList'],
        marks=pytest.mark.slow),
], ids=['forgotten rank_in', 'forgotten rank_out', 'cycle', 'both send first', 'no backward'])
def test_a_job_that_cannot_continue_ends_and_names_the_link(tmp_path, add, expected):
    done = run_job(tmp_path, PROGRAM.replace('ADD', add), ranks=3)
    assert done.returncode != 0
    first = next(line for line in done.stdout.splitlines() if 'deadlock' in line)
    for text in expected:
        assert text in first


@pytest.mark.skipif(sys.version_info < (3, 11), reason='needs notes of exceptions')
def test_an_error_of_a_link_has_a_note(comm):
    """Chainer's error contains only the name of the function."""
    model = MultiNodeChainList(comm)
    model.add_link(chainer.links.Linear(5, 2))
    with pytest.raises(chainer.utils.type_check.InvalidType) as caught:
        model(np.ones((4, 3), 'f'))
    assert caught.value.__notes__ == [
        'in link 0 (Linear, rank_in=None, rank_out=None) of MultiNodeChainList on rank '
        f'{comm.rank}, with inputs float32 (4, 3)']
