"""Every batch normalization of a model is replaced, and nothing else."""
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.link_hooks import TimerHook
from shared_fixtures import communicators

from chainermn.links import MultiNodeBatchNormalization, create_mnbn_model

comm = communicators('naive', 'version7')


class Block(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.fc = L.Linear(3, 3)
            self.bn = L.BatchNormalization(3, decay=0.7, eps=1e-3)

    def forward(self, x):
        return F.relu(self.bn(self.fc(x)))


MODELS = {
    'chain': Block,
    'sequential': lambda: chainer.Sequential(L.Linear(3, 3), L.BatchNormalization(3), F.relu),
    'chain list': lambda: chainer.ChainList(Block(), L.BatchNormalization(3)),
    'nested': lambda: chainer.Sequential(Block(), chainer.Sequential(Block(), F.tanh), F.relu),
    'link itself': lambda: L.BatchNormalization(3, use_gamma=False),
    'repeated': lambda: chainer.Sequential(Block()).repeat(2),
}


@pytest.mark.parametrize('name', MODELS)
def test_links_are_replaced_and_values_kept(comm, name):
    model = MODELS[name]()
    for link in model.links():
        if isinstance(link, L.BatchNormalization):
            link.avg_mean[...] = 5
            link.avg_var[...] = 6
            link.beta.array[...] = 7
            link.N = 8
            link.add_hook(TimerHook())
    converted = create_mnbn_model(model, comm)
    kinds = [type(link) for link in model.links()]
    wanted = [MultiNodeBatchNormalization if kind is L.BatchNormalization else kind
              for kind in kinds]
    assert [type(link) for link in converted.links()] == wanted
    assert MultiNodeBatchNormalization not in kinds  # the original is as it was
    values, new_values = dict(model.namedparams()), dict(converted.namedparams())
    assert values.keys() == new_values.keys()
    for path, parameter in values.items():
        np.testing.assert_array_equal(parameter.array, new_values[path].array)
        assert new_values[path] is not parameter
    for link, new in zip(model.links(), converted.links(), strict=True):
        if isinstance(link, L.BatchNormalization):
            assert (new.avg_mean == 5).all() and (new.avg_var == 6).all() and new.N == 8
            assert (new.decay, new.eps, new.comm) == (link.decay, link.eps, comm)
            assert (new.gamma is None) == (link.gamma is None)
            assert [*new.local_link_hooks] == ['TimerHook']


def test_the_parameters_are_those_that_are_used(comm):
    """Also of a layer that the model holds twice."""
    bn = L.BatchNormalization(2)
    model = create_mnbn_model(chainer.Sequential(bn, F.relu, chainer.Sequential(bn), F.sum), comm)
    model.cleargrads()
    model(np.arange(8, dtype=np.float32).reshape(4, 2)).backward()
    assert all(param.grad is not None for param in model.params())
    assert len({id(param) for param in model.params()}) == 2


def test_converting_twice_changes_nothing(comm):
    once = create_mnbn_model(Block(), comm)
    assert type(create_mnbn_model(once, comm).bn) is MultiNodeBatchNormalization


def test_axis(comm):
    """``axis`` must leave only axis 1, and ``size`` must then be given."""
    for axis in (0, 1), (1, 2):
        with pytest.raises(ValueError, match='axis'):
            create_mnbn_model(chainer.Sequential(L.BatchNormalization(axis=axis)), comm)
    with pytest.raises(ValueError, match='Pass size'):
        create_mnbn_model(chainer.Sequential(L.BatchNormalization(axis=0)), comm)
    x = np.random.RandomState(0).normal(size=(4, 3, 5)).astype('f')
    alone = L.BatchNormalization(axis=(0, 2), size=(3,))
    link = create_mnbn_model(alone, comm)
    np.testing.assert_allclose(link(x).array, alone(x).array, rtol=1e-4, atol=1e-5)


def test_other_kinds_of_batch_normalization_are_rejected(comm):
    """Their forward would be lost; a subclass that only has other defaults is converted."""
    class Small(L.BatchNormalization):
        def __init__(self):
            super().__init__(2)

    assert type(create_mnbn_model(Small(), comm)) is MultiNodeBatchNormalization
    with pytest.raises(ValueError, match='cannot replace BatchRenormalization'):
        create_mnbn_model(chainer.Sequential(L.BatchRenormalization(2)), comm)


def test_links_share_parameters_as_before(comm):
    model = chainer.Sequential(L.BatchNormalization(2), L.BatchNormalization(2))
    with model[1].init_scope():
        model[1].gamma = model[0].gamma
    converted = create_mnbn_model(model, comm)
    assert converted[1].gamma is converted[0].gamma
    assert len({id(param) for param in converted.params()}) == 3


def test_links_in_other_attributes_are_replaced(comm):
    """Such as a list of layers: otherwise forward would use the original link."""
    class Layers(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.bn = L.BatchNormalization(2)
            self.layers = [self.bn, F.tanh]
            self.by_name = {'normalization': (self.bn,)}

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x + self.by_name['normalization'][0](x)

    x = np.random.RandomState(0).normal(size=(comm.size, 4, 2)).astype('f')
    model = create_mnbn_model(Layers(), comm)
    wanted = Layers()(x.reshape(-1, 2)).array.reshape(x.shape)  # all examples in one process
    np.testing.assert_allclose(model(x[comm.rank]).array, wanted[comm.rank], rtol=1e-4, atol=1e-5)
    assert model.layers[0] is model.by_name['normalization'][0] is model.bn


@pytest.mark.parametrize('is_alone', [True, False])
def test_conversion_to_pytorch(comm, is_alone):
    """One rank converts the model without the others; the module equals one of one rank."""
    torch = pytest.importorskip('torch')
    import chainer_compat

    model = Block()
    model.bn.avg_var[...] = 2
    converted = create_mnbn_model(model, comm)
    comm.bcast_data(converted)
    model.copyparams(converted)
    x = np.random.RandomState(comm.rank).randn(4, 3).astype('f')
    if comm.rank == 0 or not is_alone:
        module = chainer_compat.to_torch(converted, x, train=True)
        expected = chainer_compat.to_torch(model, x, train=True)
        for each in module, expected:
            each.train()(torch.from_numpy(x)).sum().backward()
        for (name, value), (_, other) in zip(
                module.state_dict().items(), expected.state_dict().items(), strict=True):
            np.testing.assert_array_equal(value, other, name)
