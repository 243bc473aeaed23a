"""A law of multi-node batch normalization: it matches one process that computes in float64."""

import warnings

import chainer
import numpy as np
import pytest
from laws.law import law, planted
from laws.programs import seeds

from chainermn.functions.batch_normalization import (
    MultiNodeBatchNormalizationFunction,
    _MultiNodeBatchNormalization,
)
from chainermn.links import MultiNodeBatchNormalization, create_mnbn_model

pytestmark = pytest.mark.mpi(min_size=2)

TOLERANCE = {'e': 2e-2, 'f': 2e-4, 'd': 1e-9}
ONE_SAMPLE = 'Multi-node batch normalization got one sample in total'


class Definition:
    """Batch normalization in one process, written from its definition."""

    def __init__(self, gamma, beta, eps):
        self.gamma, self.beta, self.eps = gamma, beta, eps
        self.avg_mean, self.avg_var = np.zeros(gamma.shape), np.zeros(gamma.shape)

    def train(self, x, gy, decay):
        """Return the output, and the gradients of the input, gamma and beta."""
        axis = (0, *range(1 + self.gamma.ndim, x.ndim))
        wide = (slice(None), *[slice(None)] * (self.gamma.ndim - 1), *[None] * (len(axis) - 1))
        gamma, beta = self.gamma[wide], self.beta[wide]
        n = x.size // self.gamma.size
        mean, var = x.mean(axis), ((x - x.mean(axis, keepdims=True)) ** 2).sum(axis) / n
        std = np.sqrt(var + self.eps)[wide]
        x_hat = (x - mean[wide]) / std
        ggamma, gbeta = (gy * x_hat).sum(axis), gy.sum(axis)
        gx = gamma / std * (gy - gbeta[wide] / n - x_hat * ggamma[wide] / n)
        self.avg_mean = decay * self.avg_mean + (1 - decay) * mean
        self.avg_var = decay * self.avg_var + (1 - decay) * var * (n / max(n - 1, 1))
        return gamma * x_hat + beta, gx, ggamma, gbeta

    def test(self, x):
        wide = (slice(None), *[slice(None)] * (self.gamma.ndim - 1),
                *[None] * (x.ndim - 1 - self.gamma.ndim))
        x_hat = (x - self.avg_mean[wide]) / np.sqrt(self.avg_var + self.eps)[wide]
        return self.gamma[wide] * x_hat + self.beta[wide]


class FunctionOf13:
    """The function of ChainerMN 1.3, as a link."""

    def __init__(self, bn, comm):
        self.bn = bn
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', DeprecationWarning)
            self.function = MultiNodeBatchNormalizationFunction(comm, bn.eps, decay=bn.decay)

    def __call__(self, x):
        fixed = () if chainer.config.train else (self.avg_mean, self.avg_var)
        return self.function(x, self.bn.gamma, self.bn.beta, *fixed)

    @property
    def avg_mean(self):
        return self.function.running_mean

    @property
    def avg_var(self):
        return self.function.running_var


def with_layout(x, random):
    """Return an array equal to ``x``, with a random memory layout."""
    choice = random.randint(4)
    if choice == 1:
        return np.asfortranarray(x)
    if choice == 2:
        return x[::-1].copy()[::-1]
    if choice == 3:
        return np.repeat(x, 2, axis=-1)[..., ::2]
    return x


def spread(random, n, *shape):
    """Draw numbers that differ along the first axis, for any length of that axis."""
    steps = np.argsort(random.random_sample((n, *shape)), axis=0)
    return (steps - (n - 1) / 2) * (4 / max(n, 1)) + random.normal(size=(n, *shape)) / n / 9


def close(found, expected, dtype):
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(found, expected, rtol=tolerance,
                               atol=tolerance * max(1, abs(expected).max(initial=0)))


def count_own_examples(get_mean_and_var):
    def changed(self, axis, gamma, x, *args):
        mean, var = get_mean_and_var(self, axis, gamma, x, *args)
        self._total = max(1, x.size // gamma.size)
        return mean, var
    return changed


@law(seeds('naive', 'flat', 'version7'),
     planted(_MultiNodeBatchNormalization, 'get_mean_and_var', count_own_examples))
def test_batch_normalization(comm, program):
    """Statistics, outputs and gradients match one process, for any number of examples per rank."""
    random = np.random.RandomState(program.seed)
    channels = [(3,), (1,), (2, 2)][random.randint(3)]
    others = [(), (2, 3), (4,), (1, 1)][random.randint(4)]
    x_dtype, dtype = 'efd'[random.randint(3)], 'efd'[random.randint(3)]
    worst = min(x_dtype, dtype, key='efd'.index)
    eps, decay = [2e-5, 1e-2][random.randint(2)], [.9, .5][random.randint(2)]
    kind = ['link', 'create_mnbn_model', 'function'][random.randint(3)]
    torch = ['auto', 'never'][random.randint(2)]
    sizes = [random.randint(6) for _ in range(comm.size)]
    if not sum(sizes):
        sizes[random.randint(comm.size)] = 1

    mine = slice(sum(sizes[:comm.rank]), sum(sizes[:comm.rank + 1]))
    scale = kind == 'function' or random.randint(4) > 0
    reference = chainer.links.BatchNormalization(
        channels, decay, eps, np.dtype(dtype), use_gamma=scale, initial_avg_var=0)
    if scale:
        reference.gamma.array[...] = random.normal(1, .5, channels)
    reference.beta.array[...] = random.normal(0, 1, channels)
    bn = create_mnbn_model(reference, comm)
    if kind == 'link':
        bn = MultiNodeBatchNormalization(channels, comm, decay, eps, np.dtype(dtype), scale)
        bn.copyparams(reference, copy_persistent=False)
    definition = Definition(reference.gamma.array.astype('d') if scale else np.ones(channels),
                            reference.beta.array.astype('d'), eps)
    called = FunctionOf13(bn, comm) if kind == 'function' else bn
    said, expected_warnings, dtypes = [], [], []
    pairs = []  # compared at the end, when no rank waits for another one
    for step in range(2):
        total = sum(sizes)
        x = spread(random, total * int(np.prod(others)), *channels).reshape(
            total, *others, *channels)
        x = np.moveaxis(x, range(1, 1 + len(others)), range(-len(others), 0)).astype(x_dtype)
        gy = random.normal(0, 1, x.shape).astype(x_dtype)
        finetune = kind != 'function' and random.randint(4) == 0
        if finetune and step == 0:
            bn.start_finetuning()
        bn.cleargrads()
        variable = chainer.Variable(with_layout(x[mine], random))
        with warnings.catch_warnings(record=True) as caught, \
                chainer.using_config('use_torch', torch):
            warnings.simplefilter('always')
            y = called(variable, finetune=True) if finetune else called(variable)
            y.grad = with_layout(gy[mine], random)
            y.backward()
        messages = [str(warning.message)[:len(ONE_SAMPLE)] for warning in caught]
        said.append(messages)
        expected_warnings.append([ONE_SAMPLE] * int(x.size == np.prod(channels)))
        wide = definition.train(x.astype('d'), gy.astype('d'),
                                1 - 1 / bn.N if finetune else decay)
        # The optimizer averages over the ranks, but the losses are summed here.
        found = [y.array, variable.grad, bn.gamma.grad * comm.size if scale else None,
                 bn.beta.grad * comm.size]
        for i, (a, b) in enumerate(zip(found, wide, strict=True)):
            if a is not None:
                pairs.append((a.copy(), b[mine] if i < 2 else b))
        dtypes.append((y.dtype, variable.grad.dtype, bn.beta.grad.dtype))
        pairs += [(called.avg_mean.copy(), definition.avg_mean),
                  (called.avg_var.copy(), definition.avg_var)]
    bits = comm.allgather_obj(called.avg_mean.tobytes() + called.avg_var.tobytes())
    assert bits == bits[:1] * comm.size
    assert said == expected_warnings
    assert dtypes == [(x_dtype, x_dtype, dtype)] * 2
    for found, expected in pairs:
        close(found, expected, worst)
    with chainer.using_config('train', False), chainer.using_config('use_torch', torch):
        close(called(x).array, definition.test(x.astype('d')), worst)
