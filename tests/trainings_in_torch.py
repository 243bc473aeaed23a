"""The same training steps in Chainer and in PyTorch, for tests that move training to PyTorch."""

import chainer.functions as F
import numpy as np
import torch


def train(optimizer, data):
    """Update a Chainer model with batches of inputs and labels."""
    for x, t in data:
        optimizer.update(lambda x, t: F.softmax_cross_entropy(optimizer.target(x), t), x, t)


def train_in_torch(module, optimizer, data):
    """Update a PyTorch module in the same way."""
    for x, t in data:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(torch.tensor(x)), torch.tensor(t)).backward()
        optimizer.step()


def assert_same(model, module, tolerance):
    """Assert that both have the same parameters."""
    for path, param in model.namedparams():
        tensor = module.get_parameter(path[1:].replace('/', '.'))
        np.testing.assert_allclose(
            tensor.detach().numpy(), param.array, tolerance, tolerance, err_msg=path)
