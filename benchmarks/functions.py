"""Time of Chainer functions with PyTorch's kernels on the CPU, relative to Chainer's own kernels.

Run it in an environment with ChainerMN and PyTorch: ``python benchmarks/functions.py
[--rounds 5]``.

There is one process with one thread; both libraries take turns. As in a model, a function is called
8 times in one graph, with results of other functions. The output shows the ratio of the CPU seconds
of the forward and backward pass (median over the rounds), for 32 x 64 and 512 x 1,024 elements.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import _rounds
import chainer
import chainer.functions as F
import numpy as np
from chainer import Variable

SIZES = (32, 64), (512, 1024)

Call = Callable[[Variable, Variable], Variable]


def images(function: Callable[[Variable], Variable]) -> Call:
    """Return a function of two matrices that calls ``function`` with images of 8 x 8 pixels."""
    return lambda x, y: function(F.reshape(x, (-1, 4, 8, 8)))


def labels(x: Variable) -> np.ndarray:
    """Return a label for each row."""
    return np.arange(len(x), dtype='i') % 7


#: Calls of functions with two matrices.
CALLS: dict[str, Call] = {
    'absolute': lambda x, y: abs(x), 'add': lambda x, y: x + y,
    'add a number': lambda x, y: x + 2, 'average_pooling_2d': images(
        lambda x: F.average_pooling_2d(x, 2)),
    'absolute_error': F.absolute_error, 'broadcast_to': lambda x, y: F.broadcast_to(
        x[:1], x.shape), 'concat': lambda x, y: F.concat([x, y]),
    'divide': lambda x, y: x / (y + 2), 'divide a number': lambda x, y: 1 / (x + 2),
    'dropout': lambda x, y: F.dropout(x), 'elu': lambda x, y: F.elu(x),
    'embed_id': lambda x, y: F.embed_id(labels(x), x),
    'exp': lambda x, y: F.exp(x),
    'get_item': lambda x, y: x[:, 1:], 'huber_loss': lambda x, y: F.huber_loss(x, y, 1.),
    'layer_normalization': lambda x, y: F.layer_normalization(x, x[0], y[0]),
    'leaky_relu': lambda x, y: F.leaky_relu(x),
    'linear_interpolate': lambda x, y: F.linear_interpolate(x, x, y),
    'log': lambda x, y: F.log(x + 2), 'log1p': lambda x, y: F.log1p(x),
    'log_softmax': lambda x, y: F.log_softmax(x),
    'matmul': lambda x, y: F.matmul(x, y[:64], transb=True),
    'max_pooling_2d': images(lambda x: F.max_pooling_2d(x, 2)),
    'mean': lambda x, y: F.mean(x, 1),
    'mean_absolute_error': F.mean_absolute_error, 'mean_squared_error': F.mean_squared_error,
    'multiply': lambda x, y: x * y, 'multiply by a number': lambda x, y: x * 2,
    'power': lambda x, y: (x + 2) ** 1.5,
    'relu': lambda x, y: F.relu(x), 'separate and stack': lambda x, y: F.stack(F.separate(x[:8])),
    'sigmoid': lambda x, y: F.sigmoid(x),
    'softmax': lambda x, y: F.softmax(x), 'softmax_cross_entropy': lambda x, y:
        F.softmax_cross_entropy(x, labels(x)),
    'softplus': lambda x, y: F.softplus(x), 'split_axis': lambda x, y: F.split_axis(x, 2, 1)[0],
    'sqrt': lambda x, y: F.sqrt(x + 2), 'square': lambda x, y: F.square(x),
    'squared_error': F.squared_error, 'subtract': lambda x, y: x - y,
    'sum': lambda x, y: F.sum(x, 1), 'swapaxes': lambda x, y: F.swapaxes(x, 0, 1),
    'tanh': lambda x, y: F.tanh(x),
    'tile': lambda x, y: F.tile(x, (1, 2)), 'transpose': lambda x, y: F.transpose(x),
    'where': lambda x, y: F.where(y.array > 0, x, y),
}


def seconds(call: Call, arrays: list[np.ndarray], mode: str) -> float:
    """Return the CPU seconds of the forward and the backward pass: the minimum of three runs."""
    found = []
    with chainer.using_config('use_torch', mode):
        for _ in range(3):
            x, y = (Variable(array) for array in arrays)
            start = time.process_time()
            x, y = F.tanh(x), F.tanh(y)
            results = [call(x, y) for _ in range(8)]
            for result in results:
                result.grad = np.full(result.shape, .1, 'f')
            chainer.backward(results)
            found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    """Run the benchmark and print the results."""
    args = _rounds.parser(__doc__, rounds=5).parse_args()
    random = np.random.RandomState(0)
    rows = []
    for name, call in CALLS.items():
        row: list = [name]
        for shape in SIZES:
            arrays = [random.uniform(-1, 1, shape).astype('f') for _ in range(2)]
            ratios = [seconds(call, arrays, 'auto') / seconds(call, arrays, 'never')
                      for _ in range(2 if args.quick else args.rounds + 1)]
            row.append(statistics.median(ratios[1:]))  # the first round warms up
        rows.append(row)
    _rounds.table(['function', *(f'{a} x {b:,}' for a, b in SIZES)], rows,
                  "Time with PyTorch's kernels / time with Chainer's, by the size of the arrays")
    print(_rounds.load())


if __name__ == '__main__':
    main()
