"""Linear regression on distributed data, with only a KVStore.

    mpiexec -n 2 python linear_regression.py

Each process has its own points. It pulls the weights, computes the gradient for some of its
points, and pushes it; the store applies the optimizer.
"""

import argparse
import pathlib

import chainer
import numpy as np

import chainermn

WEIGHT = np.array([2., -3.4], np.float32)
BIAS = np.float32(4.2)


def parse_arguments():
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--kvstore', choices=['local', 'dist_sync', 'dist_async'],
                        default='dist_sync', help='type of the store')
    parser.add_argument('--iteration', type=int, default=200, help='steps of each process')
    parser.add_argument('--batchsize', type=int, default=10, help='points per process and step')
    parser.add_argument('--lr', type=float, default=.03, help='learning rate')
    parser.add_argument('--out', default='result', help='folder for the weights')
    return parser.parse_args()


def main():
    """Fit the line. Every process runs this function."""
    args = parse_arguments()
    kvstore = chainermn.kvstore.create(args.kvstore)

    # The points of this process: y = x . WEIGHT + BIAS, plus a little noise.
    random = np.random.RandomState(kvstore.rank)
    x = random.randn(1000, 2).astype(np.float32)
    y = x @ WEIGHT + BIAS + .01 * random.randn(1000).astype(np.float32)

    keys = ['weight', 'bias']
    kvstore.init(keys, [np.zeros(2, np.float32), np.zeros(1, np.float32)])
    # dist_sync sums the gradients of all processes and takes one step. dist_async takes a step for
    # each process.
    pushes_per_step = kvstore.num_workers if args.kvstore == 'dist_sync' else 1
    kvstore.set_optimizer(chainer.optimizers.SGD(args.lr), rescale_grad=1 / pushes_per_step)

    for _ in range(args.iteration):
        weight, bias = kvstore.pull(keys)
        some = random.randint(0, len(x), args.batchsize)
        error = x[some] @ weight + bias - y[some]
        kvstore.push(keys, [2 * error @ x[some] / len(some), 2 * error.mean(keepdims=True)])

    kvstore.barrier()  # all pushes have been merged
    weight, bias = kvstore.pull(keys)
    if kvstore.rank == 0:
        out = pathlib.Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        np.savez(out / 'weights.npz', weight=weight, bias=bias)
        print(f'{kvstore.num_workers} process{"es" * (kvstore.num_workers > 1)}, {kvstore.type}: '
              f'weight {weight.round(2)}, bias {bias.round(2)}')
        print(f'The points were generated with weight {WEIGHT.round(2)}, bias [{BIAS:.1f}]')


if __name__ == '__main__':
    main()
