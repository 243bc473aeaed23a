"""An n-step RNN over all ranks against one process that runs the layers in turn."""
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from shared_fixtures import communicators

from chainermn.functions import pseudo_connect
from chainermn.links import create_multi_node_n_step_rnn

pytestmark = pytest.mark.every_size

comm = communicators('naive', 'version7')


def make(kind, rank):
    np.random.seed(rank)
    return getattr(L, kind)(1, 3, 2, 0.0)


def sequences(rank):
    rng = np.random.RandomState(50 + rank)
    return [rng.normal(0, 1, (length, 3)).astype(np.float32) for length in (4, 2)]


@pytest.mark.parametrize('kind', ['NStepLSTM', 'NStepGRU'])
def test_states_pass_from_rank_to_rank(comm, kind):
    links = [make(kind, rank) for rank in range(comm.size)]
    n_cells = links[0].n_cells
    states = (None,) * n_cells
    losses = []
    for rank, link in enumerate(links):
        *states, ys = link(*states, sequences(rank))
        losses.append(sum(F.sum(y * y) for y in ys) * (rank + 1))
    for link in links:
        link.cleargrads()
    sum(losses).backward()

    rank = comm.rank
    ours = create_multi_node_n_step_rnn(
        make(kind, rank), comm,
        rank_in=rank - 1 if rank > 0 else None,
        rank_out=rank + 1 if rank < comm.size - 1 else None)
    ours.cleargrads()
    *cells, ys, delegate = ours(sequences(rank))
    assert len(cells) == n_cells
    loss = sum(F.sum(y * y) for y in ys) * (rank + 1)
    np.testing.assert_allclose(loss.array, losses[rank].array, rtol=1e-5)
    if rank < comm.size - 1:
        loss, = pseudo_connect(delegate, loss)
    else:
        assert delegate is None
    loss.backward()
    for (path, wanted), (_, got) in zip(sorted(links[rank].namedparams()),
                                        sorted(ours.actual_rnn.namedparams()), strict=True):
        np.testing.assert_allclose(got.grad, wanted.grad, rtol=1e-4, atol=1e-5, err_msg=path)


def test_other_links_are_rejected(comm):
    with pytest.raises(ValueError, match='n-step RNN'):
        create_multi_node_n_step_rnn(L.Linear(2, 2), comm)
