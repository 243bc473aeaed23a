"""Model parallelism: the middle layer of a perceptron is on a different process than the others.

    mpiexec -n 2 python train_mnist_model_parallel.py

Process 0 reads the digits and computes the loss. Changes for model parallelism are marked (MN).
"""

import argparse
import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.backends import cuda
from chainer.training import extensions
from train_mnist import DATASETS

import chainermn


class FirstAndLast(chainermn.MultiNodeChainList):
    """On process 0: the first layer, which sends its output to process 1, and the last layer."""

    def __init__(self, comm, n_units):
        super().__init__(comm)
        self.add_link(chainer.Sequential(L.Linear(None, n_units), F.relu), rank_out=1)
        self.add_link(L.Linear(n_units, 10), rank_in=1)


class Middle(chainermn.MultiNodeChainList):
    """On process 1: the middle layer."""

    def __init__(self, comm, n_units):
        super().__init__(comm)
        self.add_link(
            chainer.Sequential(L.Linear(n_units, n_units), F.relu), rank_in=0, rank_out=0)


def parse_arguments():
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--communicator', help='name of the communicator; '
                        'default: pure_nccl with --gpu, else flat')
    parser.add_argument('--gpu', action='store_true', help='use one GPU per process')
    parser.add_argument('--dataset', choices=DATASETS, default='digits')
    parser.add_argument('--batchsize', type=int, default=32, help='examples per step')
    parser.add_argument('--epoch', type=int, default=20, help='number of epochs')
    parser.add_argument('--iteration', type=int, help='stop after this number of steps')
    parser.add_argument('--unit', type=int, default=100, help='units in each hidden layer')
    parser.add_argument('--seed', type=int, default=0, help='random seed')
    parser.add_argument('--out', default='result', help='folder for the log')
    return parser.parse_args()


def main():
    """Train the model. Both processes run this function."""
    args = parse_arguments()
    comm = chainermn.create_communicator(
        args.communicator or ('pure_nccl' if args.gpu else 'flat'))
    if comm.size != 2:
        sys.exit(f'This example needs two processes, not {comm.size}. Start it with mpiexec -n 2.')
    device = chainer.get_device(
        comm.intra_rank % cuda.cupy.cuda.runtime.getDeviceCount() if args.gpu else '@numpy')
    device.use()
    np.random.seed(args.seed + comm.rank)

    train, validation = DATASETS[args.dataset]()
    if comm.rank == 0:
        model = L.Classifier(FirstAndLast(comm, args.unit))
    else:
        # (MN) This process gets its input from process 0. An empty dataset of the same length gives
        # it the same number of iterations per epoch. Its model returns an empty Variable instead of
        # a loss, from which backward starts.
        model = Middle(comm, args.unit)
        train = chainermn.datasets.create_empty_dataset(train)
        validation = chainermn.datasets.create_empty_dataset(validation)
    model.to_device(device)

    # (MN) Use an ordinary optimizer: no two processes share a parameter, so nothing is averaged.
    optimizer = chainer.optimizers.Adam().setup(model)

    # With --iteration, validate only at the end.
    stop = (args.iteration, 'iteration') if args.iteration else (args.epoch, 'epoch')
    interval = stop if args.iteration else (1, 'epoch')
    train_iterator = chainer.iterators.SerialIterator(train, args.batchsize)
    validation_iterator = chainer.iterators.SerialIterator(
        validation, len(validation), repeat=False, shuffle=False)
    updater = training.updaters.StandardUpdater(train_iterator, optimizer, device=device)
    trainer = training.Trainer(updater, stop, out=args.out)

    # (MN) Process 1 also runs the evaluator, because its layer is needed. It reports nothing.
    trainer.extend(extensions.Evaluator(validation_iterator, model, device=device),
                   trigger=interval)
    if comm.rank == 0:
        log = extensions.LogReport(trigger=interval)
        trainer.extend(log)
        trainer.extend(extensions.PrintReport(
            ['epoch', 'main/loss', 'validation/main/loss',
             'main/accuracy', 'validation/main/accuracy', 'elapsed_time'], log))

    trainer.run()

    if comm.rank == 0:
        print(f'Validation accuracy: {log.log[-1]["validation/main/accuracy"]:.2%}')


if __name__ == '__main__':
    main()
