"""Train a convolutional network with channels split between all processes.

    mpiexec -n 2 python train_parallel_conv.py

Use it for layers that are too large for one device. Every process uses all examples and computes
its own channels of each layer. Before the next layer, allgather gathers all channels.
Changes for distributed training are marked with (MN).
"""

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.backends import cuda
from chainer.training import extensions

import chainermn


class ParallelConvolution2D(chainer.Chain):
    """A convolution whose output channels are split between the processes.

    Every process draws the same filters for the whole convolution and keeps its share. So the
    network does not depend on the number of processes.
    """

    def __init__(self, comm, in_channels, out_channels, ksize, pad=0):
        super().__init__()
        self.comm = comm
        filters = np.empty((out_channels, in_channels, ksize, ksize), np.float32)
        chainer.initializers.HeNormal()(filters)
        mine = np.array_split(filters, comm.size)[comm.rank]
        with self.init_scope():
            self.conv = L.Convolution2D(in_channels, len(mine), ksize, pad=pad, initialW=mine)

    def forward(self, x):
        # (MN) For each channel, backward sums the gradients of all processes.
        channels = chainermn.functions.allgather(self.comm, self.conv(x))
        return F.concat(channels, axis=1)


class Net(chainer.Chain):
    """Computes the scores of the ten digits. No two processes have the same parameter."""

    def __init__(self, comm, width):
        super().__init__()
        with self.init_scope():
            self.conv1 = ParallelConvolution2D(comm, 1, width, ksize=3, pad=1)
            self.conv2 = ParallelConvolution2D(comm, width, 2 * width, ksize=3, pad=1)
            self.conv3 = ParallelConvolution2D(comm, 2 * width, 10, ksize=1)

    def forward(self, x):
        h = F.max_pooling_2d(F.relu(self.conv1(x)), ksize=2)
        h = F.relu(self.conv2(h))
        return F.sum(self.conv3(F.average_pooling_2d(h, h.shape[2:])), axis=(2, 3))


class Classifier(L.Classifier):
    """Reports the loss and divides it by the number of processes."""

    def __init__(self, predictor, comm):
        super().__init__(predictor)
        self.comm = comm

    def forward(self, *args):
        # (MN) Every process computes the same loss, and backward sums the gradients of all
        # processes. Without the division, the sum would be too large by the number of processes.
        return super().forward(*args) / self.comm.size


def load_digits():
    """Return scikit-learn's 1,797 digits of 8x8 pixels: 80% for training, 20% for validation."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = labels.astype(np.int32)
    order = np.random.RandomState(0).permutation(len(labels))
    train, validation = order[:1437], order[1437:]
    return (chainer.datasets.TupleDataset(images[train], labels[train]),
            chainer.datasets.TupleDataset(images[validation], labels[validation]))


def load_mnist():
    """Return 60,000 digits of 28x28 pixels, which are downloaded on first use."""
    return chainer.datasets.get_mnist(ndim=3)


DATASETS = {'digits': load_digits, 'mnist': load_mnist}


def parse_arguments():
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--communicator', help='name of the communicator; '
                        'default: pure_nccl with --gpu, else flat')
    parser.add_argument('--gpu', action='store_true', help='use one GPU per process')
    parser.add_argument('--dataset', choices=DATASETS, default='digits')
    parser.add_argument('--batchsize', type=int, default=32, help='examples per step')
    parser.add_argument('--epoch', type=int, default=10, help='number of epochs')
    parser.add_argument('--iteration', type=int, help='stop after this number of steps')
    parser.add_argument('--width', type=int, default=16,
                        help='channels of the first convolution, in total')
    parser.add_argument('--seed', type=int, default=0, help='random seed')
    parser.add_argument('--out', default='result', help='folder for the log')
    return parser.parse_args()


def main():
    """Train the model. Every process runs this function."""
    args = parse_arguments()
    comm = chainermn.create_communicator(
        args.communicator or ('pure_nccl' if args.gpu else 'flat'))
    device = chainer.get_device(
        comm.intra_rank % cuda.cupy.cuda.runtime.getDeviceCount() if args.gpu else '@numpy')
    device.use()

    # (MN) Use the same seed on all processes, so that they draw the same filters.
    np.random.seed(args.seed)
    model = Classifier(Net(comm, args.width), comm)
    model.to_device(device)
    # (MN) Use an ordinary optimizer: no two processes share a parameter, so nothing is averaged.
    optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)

    # (MN) All processes read the data and use the same batches in the same order.
    train, validation = DATASETS[args.dataset]()
    train_iterator = chainermn.iterators.create_synchronized_iterator(
        chainer.iterators.SerialIterator(train, args.batchsize), comm)
    validation_iterator = chainer.iterators.SerialIterator(
        validation, args.batchsize, repeat=False, shuffle=False)

    # With --iteration, validate only at the end.
    stop = (args.iteration, 'iteration') if args.iteration else (args.epoch, 'epoch')
    interval = stop if args.iteration else (1, 'epoch')
    updater = training.updaters.StandardUpdater(train_iterator, optimizer, device=device)
    trainer = training.Trainer(updater, stop, out=args.out)
    # Validation needs all processes. All of them get the same result.
    trainer.extend(extensions.Evaluator(validation_iterator, model, device=device),
                   trigger=interval)
    if comm.rank == 0:
        log = extensions.LogReport(trigger=interval)
        trainer.extend(log)
        trainer.extend(extensions.PrintReport(
            ['epoch', 'main/loss', 'validation/main/loss',
             'main/accuracy', 'validation/main/accuracy', 'elapsed_time'], log))
        print(f'{model.count_params():,} parameters on process 0 of {comm.size}')

    trainer.run()

    if comm.rank == 0:
        print(f'Validation accuracy: {log.log[-1]["validation/main/accuracy"]:.2%}')


if __name__ == '__main__':
    main()
