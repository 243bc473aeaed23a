"""Functions that were patched for CuPy give the results of plain NumPy on the CPU."""

import chainer
import chainer.functions as F
import numpy as np
import pytest

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize('dtype', 'efd')
def test_binary_hierarchical_softmax(check, close, derivatives, normal, dtype):
    x, t = normal(5, 3, dtype=dtype), np.array([0, 3, 1, 2, 2], 'i')
    with chainer.using_config('dtype', np.dtype(dtype)):
        net = chainer.links.BinaryHierarchicalSoftmax(3, ((0, 1), (2, 3)))
    w = net.W.array[:] = normal(*net.W.shape, dtype=dtype, seed=1)
    # Of each label: the inner nodes from the root, and whether the left (1) or the right follows.
    paths = {0: {0: 1, 1: 1}, 1: {0: 1, 1: -1}, 2: {0: -1, 2: 1}, 3: {0: -1, 2: -1}}

    def reference(x, w):
        return np.array(sum(np.log1p(np.exp(-sign * (row @ w[node])))
                            for row, label in zip(x, t, strict=True)
                            for node, sign in paths[label].items()))

    check(lambda x, w: net(x, t), reference, x, w, dtype='f' if dtype == 'd' else dtype,
          needed=(True, False), eps=1e-4)
    loss = net(x, t)
    net.cleargrads()
    loss.backward()
    (grad,) = derivatives(lambda w: reference(x.astype('d'), w), [w.astype('d')], 1, 1e-4)
    close(net.W.grad, grad, 'f' if dtype == 'd' else dtype)


@pytest.mark.parametrize('dtype', 'efd')
def test_negative_sampling(check, normal, dtype):
    t, samples = np.array([1, 4, -1, 0], 'i'), np.array([[0, 2], [1, 1], [3, 3], [4, 2]], 'i')
    drawn = np.column_stack([t, samples])  # Chainer puts the labels into the first column

    def reference(x, w):
        """Logistic losses: near the right row of ``w``, and far from those that were drawn."""
        return sum(np.log1p(np.exp(-row @ w[label])) + np.log1p(np.exp(w[others] @ row)).sum()
                   for row, label, others in zip(x, t, samples, strict=True) if label >= 0)

    check(lambda x, w: F.negative_sampling(x, t, w, lambda shape: drawn.reshape(shape), 2),
          lambda *xs: np.array(reference(*xs)),
          normal(4, 3, dtype=dtype), normal(5, 3, dtype=dtype, seed=1),
          dtype='f' if dtype == 'd' else dtype, eps=1e-4)
