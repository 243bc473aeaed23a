"""Weights return to the model: by name, or by the order of layers."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
import torch
from models_to_convert import Net, draw
from torch import nn

import chainer_compat

pytestmark = pytest.mark.mpi_skip


def cnn():
    """Return a model with the layers of :func:`torch_cnn`."""
    return Net(
        lambda self, x: self.fc(F.max(F.relu(self.bn(self.conv(x))), axis=(2, 3))),
        conv=L.Convolution2D(3, 4, 3), bn=L.BatchNormalization(4), fc=L.Linear(4, 2))


def torch_cnn(channels=4):
    module = nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(),
                           nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(channels, 2))
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(.1, 1)
    return module


def test_weights_of_another_module():
    model, module, x = cnn(), torch_cnn().eval(), draw(2, 3, 6, 6)
    chainer_compat.load_weights(model, module, x)
    assert model.bn.eps == 1e-5
    with chainer.using_config('train', False):
        np.testing.assert_allclose(
            model(x).array, module(torch.from_numpy(x)).detach(), rtol=1e-5)


def test_a_bias_that_the_module_lacks():
    """As the first convolution of torchvision's ResNet, which has one in Chainer's."""
    model, module, x = cnn(), torch_cnn().eval(), draw(2, 3, 6, 6)
    module[0] = nn.Conv2d(3, 4, 3, bias=False)
    model.conv.b.array[...] = 1
    chainer_compat.load_weights(model, module, x)
    with chainer.using_config('train', False):
        np.testing.assert_allclose(
            model(x).array, module(torch.from_numpy(x)).detach(), rtol=1e-5)


def normalized(**options):
    return Net(lambda self, x: self.bn(self.fc(x)), fc=L.Linear(3, 4),
               bn=L.BatchNormalization(4, **options))


def torch_normalized(**options):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **options))
    module(torch.rand(9, 3))  # changes the means
    return module.eval()


@pytest.mark.parametrize('options, affine', [
    ({'use_gamma': False}, True), ({'use_beta': False}, True),
    ({'use_gamma': False}, False), ({'use_beta': False}, False), ({}, False)])
def test_batch_normalization_that_differs(options, affine):
    """The means of one must not become the factor of the other."""
    with pytest.raises(ValueError, match=r'has the arrays bn.*, but 1 has 1\.[wr]'):
        chainer_compat.load_weights(
            normalized(**options), torch_normalized(affine=affine), draw(5, 3))


def test_other_layers_without_weights_give_a_warning():
    module = torch_cnn()
    module[3] = nn.AdaptiveAvgPool2d(1)
    with pytest.warns(UserWarning, match='outputs differ by'):
        chainer_compat.load_weights(cnn(), module, draw(2, 3, 6, 6))


@pytest.mark.parametrize('module, message', [
    (torch_cnn(5),
     r'conv.W has shape \(4, 3, 3, 3\), but 0.weight has shape \(5, 3, 3, 3\) in '),
    (nn.Conv2d(3, 4, 3), 'The model calls 3 layers with weights, but the module calls 1'),
])
def test_nothing_is_copied_if_layers_differ(module, message):
    model = cnn()
    before = model.conv.W.array.copy()
    with pytest.raises(ValueError, match=message):
        chainer_compat.load_weights(model, module, draw(2, 3, 6, 6))
    assert (model.conv.W.array == before).all()


def test_weights_in_bfloat16():
    model, x = cnn(), draw(2, 3, 6, 6)
    weights = chainer_compat.to_torch(model, x).state_dict()
    rounded = weights['fc.W'].bfloat16()
    chainer_compat.load_weights(model, {**weights, 'fc.W': rounded})
    np.testing.assert_array_equal(model.fc.W.array, rounded.tolist())


@pytest.mark.parametrize('name, wrong, error', [
    ('fc.b', torch.empty(2, device='meta'), NotImplementedError),  # it has no data
    ('bn.N', torch.zeros(2), ValueError),
    ('bn.N', torch.tensor(1.5), ValueError),
])
def test_nothing_is_copied_if_a_tensor_cannot_be_converted(name, wrong, error):
    model = cnn()
    weights = chainer_compat.to_torch(model, draw(2, 3, 6, 6)).state_dict()
    assert name in weights
    before = model.conv.W.array.copy()
    with pytest.raises(error):
        chainer_compat.load_weights(
            model, {**{key: tensor + 1 for key, tensor in weights.items()}, name: wrong})
    assert (model.conv.W.array == before).all()


def test_names_that_are_missing():
    with pytest.raises(ValueError, match='pass the module and example inputs'):
        chainer_compat.load_weights(cnn(), torch_cnn().state_dict())


def lazy():
    """Return a model whose layers wait for their first input."""
    return Net(
        lambda self, x: self.out(self.bn(self.fc(x))), fc=L.Linear(None, 4), out=L.Linear(4, 2),
        bn=L.BatchNormalization(axis=0, use_gamma=False, use_beta=False))


def test_layers_that_wait_for_their_first_input():
    model, x = lazy(), draw(5, 3)
    model(x)  # changes the means of the batch normalization
    weights = chainer_compat.to_torch(model, x).state_dict()
    with chainer.using_config('train', False):
        expected = model(x).array
        loaded = lazy()
        before = loaded.out.W.array.copy()
        with pytest.raises(ValueError, match=r'fc\.W is not initialized.* Pass example inputs'):
            chainer_compat.load_weights(loaded, weights)
        assert (loaded.out.W.array == before).all()
        chainer_compat.load_weights(loaded, weights, x)
        np.testing.assert_array_equal(loaded(x).array, expected)
