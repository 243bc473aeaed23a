"""Models over several ranks against the same model in one process."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from each_case import each_case
from jobs import run_job
from shared_fixtures import communicators, raises_on_all

from chainermn.links import MultiNodeChainList

pytestmark = pytest.mark.every_size

comm = communicators('naive', 'version7', min_size=2)
X = np.random.RandomState(9).normal(0, 1, (3, 2)).astype(np.float32)


class Part(chainer.Chain):
    """Sums its inputs and puts them through a layer whose weights depend on a seed."""

    def __init__(self, seed, outputs=1):
        super().__init__()
        rng = np.random.RandomState(seed)
        self.outputs = outputs
        with self.init_scope():
            self.fc = L.Linear(2, 2, initialW=rng.normal(0, 1, (2, 2)).astype(np.float32))

    def forward(self, *xs):
        flat = [x for y in xs for x in (y if isinstance(y, tuple) else (y,))]
        y = F.tanh(self.fc(sum(flat)))
        return y if self.outputs == 1 else tuple(y * (i + 1) for i in range(self.outputs))


def compare(model, parts, seeds):
    """Compare gradients with those of the parts of the one-process model."""
    for link, seed in zip(model, seeds, strict=True):
        np.testing.assert_allclose(link.fc.W.grad, parts[seed].fc.W.grad, rtol=1e-4, atol=1e-6)


def one_process(seeds, **kwargs):
    parts = {seed: Part(seed, **kwargs) for seed in seeds}
    for part in parts.values():
        part.cleargrads()
    return parts


def finish(y):
    """Run backward from a loss on the model's output, or from the empty variable."""
    (F.sum(y * y) if y.size else y).backward()


def test_a_chain_over_all_ranks(comm):
    parts = one_process(range(comm.size))
    h = X
    for part in parts.values():
        h = part(h)
    F.sum(h * h).backward()

    model = MultiNodeChainList(comm)
    model.add_link(Part(comm.rank),
                   rank_in=comm.rank - 1 if comm.rank > 0 else None,
                   rank_out=comm.rank + 1 if comm.rank < comm.size - 1 else None)
    model.cleargrads()
    y = model(*([X] if comm.rank == 0 else []))
    if comm.rank == comm.size - 1:
        np.testing.assert_allclose(y.array, h.array, rtol=1e-5)
    else:
        assert y.shape == (0,)
    finish(y)
    compare(model, parts, [comm.rank])


def test_back_and_forth_many_times(comm):
    """Six parts alternate between two ranks: backward has to take them in reverse."""
    parts = one_process(range(6))
    h = X
    for part in parts.values():
        h = part(h)
    F.sum(h * h).backward()
    if comm.rank > 1:
        return
    model = MultiNodeChainList(comm)
    mine = list(range(comm.rank, 6, 2))
    for i in mine:
        model.add_link(Part(i), rank_in=1 - comm.rank if i else None,
                       rank_out=1 - comm.rank if i < 5 else None)
    model.cleargrads()
    finish(model(X) if comm.rank == 0 else model())
    compare(model, parts, mine)


@pytest.mark.parametrize('outputs', [1, 2])
def test_branch_and_join(comm, outputs):
    """Rank 0 sends to all others and to itself; the last part on rank 0 joins them."""
    seeds = range(comm.size + 2)
    parts = {seed: Part(seed, outputs if seed == 0 else 1) for seed in seeds}
    for part in parts.values():
        part.cleargrads()
    h = parts[0](X)
    y = parts[comm.size + 1](*(parts[i + 1](h) for i in range(comm.size)))
    F.sum(y * y).backward()

    model = MultiNodeChainList(comm)
    others = list(range(1, comm.size))
    if comm.rank == 0:
        model.add_link(Part(0, outputs), rank_out=[0, *others])
        model.add_link(Part(1), rank_in=0, rank_out=0)
        model.add_link(Part(comm.size + 1), rank_in=[0, *others])
        mine = [0, 1, comm.size + 1]
    else:
        model.add_link(Part(comm.rank + 1), rank_in=0, rank_out=0)
        mine = [comm.rank + 1]
    model.cleargrads()
    out = model(X) if comm.rank == 0 else model()
    if comm.rank == 0:
        np.testing.assert_allclose(out.array, y.array, rtol=1e-5)
    finish(out)
    compare(model, parts, mine)


def test_the_output_may_come_before_the_last_part(comm):
    """Rank 0 computes the output first and then something for rank 1."""
    if comm.rank > 1:
        return
    parts = one_process(range(4))
    h = parts[2](X)
    y0, y1 = parts[0](parts[1](X)), parts[3](h)
    (F.sum(y0 * y0) + F.sum(y1 * y1)).backward()
    model = MultiNodeChainList(comm)
    if comm.rank == 1:
        model.add_link(Part(1), rank_out=0)
        model.add_link(Part(3), rank_in=0)
        mine = [1, 3]
    else:
        model.add_link(Part(0), rank_in=1)
        model.add_link(Part(2), rank_out=1)
        mine = [0, 2]
    model.cleargrads()
    finish(model(X))
    compare(model, parts, mine)


class Double(chainer.Link):
    """Has no parameters, so its output needs no gradient."""

    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize('way', ['there', 'there and back', 'there, and a part of its own'])
def test_a_first_part_that_needs_no_gradient(comm, way):
    """Backward runs on all ranks all the same."""
    if comm.rank > 1:
        return
    for _ in range(3):
        parts = one_process(range(2))
        h = parts[1](2 * X)
        if way == 'there and back':
            h = parts[0](h)
        loss = F.sum(h * h)
        if way == 'there, and a part of its own':
            own = parts[0](X)
            loss += F.sum(own * own)
        loss.backward()

        model = MultiNodeChainList(comm)
        if comm.rank == 0:
            model.add_link(Double(), rank_out=1)
            if way == 'there and back':
                model.add_link(Part(0), rank_in=1)
            elif way == 'there, and a part of its own':
                model.add_link(Part(0))
        else:
            model.add_link(Part(1), rank_in=0, rank_out=0 if way == 'there and back' else None)
        model.cleargrads()
        finish(model(X) if comm.rank == 0 else model())
        if comm.rank == 1 or way != 'there':
            compare([link for link in model if isinstance(link, Part)], parts, [comm.rank])


# --- wrong lists ----------------------------------------------------------------------------------

def test_two_outputs_are_rejected(comm):
    model = MultiNodeChainList(comm)
    model.add_link(Part(0), rank_in=0)
    with pytest.raises(ValueError, match=r'link 1 \(Part, rank_in=0, rank_out=None\) of MultiNodeCh'
                                         r'ainList is the second link on this rank with rank_out='):
        model.add_link(Part(1), rank_in=0)


@each_case('ranks', [-1, 99, [0, 99], np.int64(-1)])
def test_ranks_that_do_not_exist_are_rejected(comm, ranks):
    with pytest.raises(ValueError, match=r'link 0 \(Part, .*but ranks are 0 to'):
        MultiNodeChainList(comm).add_link(Part(0), rank_out=ranks)
    with pytest.raises(ValueError, match=r'link 0 \(Part, .*but ranks are 0 to'):
        MultiNodeChainList(comm).add_link(Part(0), rank_in=ranks)


def test_an_unused_output_to_itself_is_rejected(comm):
    model = MultiNodeChainList(comm)
    model.add_link(Part(0), rank_out=comm.rank)
    with pytest.raises(ValueError, match=r'link 0 \(Part, rank_in=None, rank_out=\d\) .*no later'):
        model(X)


def test_a_missing_input_from_itself_is_rejected(comm):
    model = MultiNodeChainList(comm)
    model.add_link(Part(0), rank_in=comm.rank)
    with pytest.raises(ValueError, match=r'link 0 \(Part, rank_in=\d, rank_out=N.*no earlier'):
        model()


@pytest.mark.compares_calls
@each_case('rank_in, rank_out, text', [
    (None, 0, 'link 1 (Part, rank_in=None, rank_out=0) of MultiNodeChainList on rank 0 sends to'),
    (0, None, 'link 1 (Part, rank_in=0, rank_out=None) of MultiNodeChainList on rank 0 receives')])
def test_a_message_of_one_rank_to_itself_is_an_error_on_all(comm, rank_in, rank_out, text):
    model = MultiNodeChainList(comm)
    if comm.rank == 0:
        model.add_link(Part(0), rank_out=[])  # its output is not used
        model.add_link(Part(0), rank_in, rank_out)
    else:
        model.add_link(Part(0))

    with raises_on_all(ValueError, text) as caught:
        model(X)
        comm.barrier()  # any collective, such as an update of the optimizer
    assert 'send_activation' not in str(caught.value)


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
    ('link(rank_out=1) if rank == 0 else link(rank_in=0) if rank == 1 else link()\n'
     'if rank == 1: model(), model()',
     ['rank 0 waits in recv_gradient #2 from rank 1 tag 0 of link 0 (Linear, rank_in=None, '
      'rank_out=1) of MultiNodeChainList', 'rank 1 waits in recv_activation #2 from rank 0 tag 0 '
      'of link 0 (Linear, rank_in=0, rank_out=None) of MultiNodeChainList']),
], ids=['forgotten rank_in', 'forgotten rank_out', 'cycle', 'both send first', 'no backward'])
def test_a_job_that_cannot_continue_ends_and_names_the_link(tmp_path, add, expected):
    done = run_job(tmp_path, PROGRAM.replace('ADD', add), ranks=3)
    assert done.returncode != 0
    first = next(line for line in done.stdout.splitlines() if 'deadlock' in line)
    for text in expected:
        assert text in first


# --- correct lists that look unusual --------------------------------------------------------------

def test_a_rank_that_appears_several_times(comm):
    """Rank 0 sends two outputs of one part to rank 1, which gets them as two arguments."""
    if comm.rank > 1:
        return
    parts = one_process(range(2))
    h = parts[0](X)
    y = parts[1](h, h)
    F.sum(y * y).backward()
    model = MultiNodeChainList(comm)
    if comm.rank == 0:
        model.add_link(Part(0), rank_out=[np.int64(1), 1])
    else:
        model.add_link(Part(1), rank_in=(0, np.int64(0)))
    model.cleargrads()
    finish(model(X) if comm.rank == 0 else model())
    compare(model, parts, [comm.rank])


def test_on_split_communicators(comm):
    """Each group of two ranks, in reverse order, has its own model."""
    parts = one_process(range(2))
    y = parts[1](parts[0](X))
    F.sum(y * y).backward()
    group = comm.split(comm.rank // 2, -comm.rank)
    if group.size > 1:
        model = MultiNodeChainList(group)
        if group.rank == 0:
            model.add_link(Part(0), rank_out=1)
        else:
            model.add_link(Part(1), rank_in=0)
        model.cleargrads()
        finish(model(X) if group.rank == 0 else model())
        compare(model, parts, [group.rank])
    group.finalize()
