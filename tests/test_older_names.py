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
    """Train as scripts did in 2018: in a loop without create_multi_node_optimizer."""
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
    messages = ' '.join(str(w.message) for w in caught)
    for today in ('multi_node_mean_grad', 'alltoall'):
        assert today in messages
    weights = model.predictor.W.array.tobytes()
    assert comm.allgather_obj(weights) == [weights] * comm.size


def test_the_module_scatter_dataset():
    with pytest.warns(DeprecationWarning, match='chainermn.datasets.scatter$'):
        from chainermn.datasets.scatter_dataset import DataSizeError
    assert DataSizeError is chainermn.DataSizeError
    import chainermn.datasets.scatter_dataset as same  # importing it does not hide the function
    assert same is chainermn.datasets.scatter_dataset is chainermn.scatter_dataset


@pytest.mark.parametrize('averages', [False, True], ids=['first call', 'with averages'])
def test_batch_normalization_function(averages):
    """It computes the same outputs, gradients and averages as the current link, in both modes."""
    from chainermn.functions.batch_normalization import MultiNodeBatchNormalizationFunction
    comm = chainermn.create_communicator('naive')
    x = np.random.RandomState(comm.rank).randn(4, 3, 2).astype(np.float32) + comm.rank
    link = chainermn.links.MultiNodeBatchNormalization(3, comm, eps=1e-3, decay=0.8)
    mean = var = None
    if averages:
        mean, var = np.arange(3, dtype='f'), np.arange(1, 4, dtype='f')
        link.avg_mean[...], link.avg_var[...] = mean, var
    with pytest.warns(DeprecationWarning, match='chainermn.links.MultiNodeBatchNormalization'):
        function = MultiNodeBatchNormalizationFunction(comm, 1e-3, mean, var, 0.8)
    results = []
    for normalize in (function, lambda x, gamma, beta: link(x)):
        link.cleargrads()
        x_variable = chainer.Variable(x)
        y = normalize(x_variable, link.gamma, link.beta)
        F.sum(y ** 3).backward()
        results.append([y.array, x_variable.grad, link.gamma.grad, link.beta.grad])
    results[0] += [function.running_mean, function.running_var]
    results[1] += [link.avg_mean, link.avg_var]
    if averages:
        np.testing.assert_array_equal(mean, np.arange(3))
    with chainer.using_config('train', False):
        results[0].append(function(x, link.gamma, link.beta, link.avg_mean, link.avg_var).array)
        results[1].append(link(x).array)
    for ours, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, expected)
    comm.finalize()
