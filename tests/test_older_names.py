"""A script with the names of ChainerMN 1.0 to 1.3 runs, with deprecation warnings only."""
import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn
import chainermn.functions


def train(communicator_name):
    """Writes as one wrote in 2018: a loop without create_multi_node_optimizer."""
    comm = chainermn.create_communicator(communicator_name)
    model = L.Classifier(L.Linear(2, 2))
    optimizer = chainer.optimizers.SGD(0.1)
    optimizer.setup(model)
    comm.broadcast_data(model)
    data = [(np.full(2, i, np.float32), np.int32(i % 2)) for i in range(8)]
    data = chainermn.scatter_dataset(data if comm.rank == 0 else None, comm)
    for _ in range(2):
        x, t = chainer.dataset.concat_examples([data[i] for i in range(len(data))])
        model.cleargrads()
        model(x, t).backward()
        comm.allreduce_grad(model)
        optimizer.update()
    xs = [chainer.Variable(np.full(1, i, np.float32)) for i in range(comm.size)]
    ys = chainermn.functions.all_to_all(comm, xs, device=-1)
    F.sum(sum(ys)).backward()
    if comm.size > 1:
        if comm.rank == 0:
            chainermn.functions.send(xs[0], comm, rank=1)
        elif comm.rank == 1:
            chainermn.functions.recv(comm, rank=0, device=-1)
    return comm, model


def test_deprecation_warnings_only():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        comm, model = train('naive')
    assert {w.category for w in caught} == {DeprecationWarning}
    said = ' '.join(str(w.message) for w in caught)
    for today in ('multi_node_mean_grad', 'alltoall'):
        assert today in said
    weights = model.predictor.W.array.tobytes()
    assert comm.allgather_obj(weights) == [weights] * comm.size


@pytest.mark.parametrize('name', ['hierarchical', 'two_dimensional', 'single_node'])
def test_old_communicators_are_pure_nccl(name):
    """They warn, and need what pure_nccl needs."""
    from chainermn import nccl
    from chainermn.communicators.pure_nccl_communicator import PureNcclCommunicator
    with pytest.warns(DeprecationWarning, match='pure_nccl'):
        try:
            comm = chainermn.create_communicator(name)
        except RuntimeError as error:
            assert not nccl._available or 'GPU' in str(error) or 'CUDA' in str(error)
        else:
            assert isinstance(comm, PureNcclCommunicator)
