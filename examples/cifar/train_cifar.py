"""Train a small VGG-like network on color images, with synchronized batch normalization.

    mpiexec -n 2 python train_cifar.py --mnbn

Changes for distributed training are marked with (MN).
"""

import argparse
import pathlib

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.backends import cuda
from chainer.training import extensions

import chainermn


class Block(chainer.Chain):
    """Convolution, batch normalization, ReLU."""

    def __init__(self, n_channels):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(None, n_channels, ksize=3, pad=1, nobias=True)
            self.bn = L.BatchNormalization(n_channels)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class VGG(chainer.Chain):
    """Three pairs of blocks. Each pair halves the image size and doubles the channels."""

    def __init__(self, n_classes, width):
        super().__init__()
        with self.init_scope():
            self.blocks = chainer.ChainList(
                *(Block(width * n) for n in (1, 1, 2, 2, 4, 4)))
            self.fc = L.Linear(None, n_classes)

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i % 2:
                x = F.max_pooling_2d(x, ksize=2)
        return self.fc(F.dropout(F.average_pooling_2d(x, x.shape[2:]), 0.3))


def load_digits():
    """Return scikit-learn's 1,797 digits as color images of 32x32 pixels."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    images = images.repeat(3, axis=1).repeat(4, axis=2).repeat(4, axis=3)
    labels = labels.astype(np.int32)
    order = np.random.RandomState(0).permutation(len(labels))
    train, validation = order[:1437], order[1437:]
    return (chainer.datasets.TupleDataset(images[train], labels[train]),
            chainer.datasets.TupleDataset(images[validation], labels[validation]))


DATASETS = {  # and the number of classes
    'digits': (load_digits, 10),
    'cifar10': (chainer.datasets.get_cifar10, 10),  # downloaded on first use
    'cifar100': (chainer.datasets.get_cifar100, 100),
}


def parse_arguments():
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--communicator', help='name of the communicator; '
                        'default: pure_nccl with --gpu, else flat')
    parser.add_argument('--gpu', action='store_true', help='use one GPU per process')
    parser.add_argument('--dataset', choices=DATASETS, default='digits')
    parser.add_argument('--mnbn', action='store_true',
                        help='synchronize batch normalization between processes')
    parser.add_argument('--batchsize', type=int, default=32, help='examples per process and step')
    parser.add_argument('--learnrate', type=float, default=0.05,
                        help='learning rate, halved every 25 epochs')
    parser.add_argument('--epoch', type=int, default=10, help='number of epochs')
    parser.add_argument('--iteration', type=int, help='stop after this number of steps')
    parser.add_argument('--width', type=int, default=8, help='channels of the first convolution')
    parser.add_argument('--seed', type=int, default=0, help='random seed')
    parser.add_argument('--out', default='result', help='folder for log and snapshots')
    parser.add_argument('--resume', help='snapshot to resume from')
    return parser.parse_args()


def main():
    """Train the model. Every process runs this function."""
    args = parse_arguments()

    # (MN) Create one communicator for all processes. With --gpu, each process uses a different GPU
    # of its node, or the only GPU that Slurm makes visible to it.
    comm = chainermn.create_communicator(
        args.communicator or ('pure_nccl' if args.gpu else 'flat'))
    device = chainer.get_device(
        comm.intra_rank % cuda.cupy.cuda.runtime.getDeviceCount() if args.gpu else '@numpy')
    device.use()
    np.random.seed(args.seed + comm.rank)
    if args.gpu:
        cuda.cupy.random.seed(args.seed + comm.rank)

    load, n_classes = DATASETS[args.dataset]
    model = L.Classifier(VGG(n_classes, args.width))
    if args.mnbn:
        # (MN) Replace each BatchNormalization with MultiNodeBatchNormalization.
        model = chainermn.links.create_mnbn_model(model, comm)
    model.to_device(device)

    # (MN) Average gradients over all processes. Hooks such as weight decay use the averages.
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(args.learnrate), comm)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(5e-4))

    # (MN) Rank 0 reads the data and sends each process a shard.
    train, validation = load() if comm.rank == 0 else (None, None)
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=args.seed)
    validation = chainermn.scatter_dataset(validation, comm, force_equal_length=False)
    train_iterator = chainer.iterators.SerialIterator(train, args.batchsize)
    validation_iterator = chainer.iterators.SerialIterator(
        validation, args.batchsize, repeat=False, shuffle=False)

    # With --iteration, validate and save only at the end.
    stop = (args.iteration, 'iteration') if args.iteration else (args.epoch, 'epoch')
    interval = stop if args.iteration else (1, 'epoch')
    updater = training.updaters.StandardUpdater(train_iterator, optimizer, device=device)
    trainer = training.Trainer(updater, stop, out=args.out)
    trainer.extend(extensions.ExponentialShift('lr', 0.5), trigger=(25, 'epoch'))

    # (MN) With ordinary batch normalization, the moving averages of each process cover only its own
    # batches. Average them over all processes before they are used for validation or saved.
    trainer.extend(chainermn.extensions.AllreducePersistent(model, comm), trigger=interval)
    # (MN) Validate on all processes. Each gets the result for the whole validation set.
    evaluator = extensions.Evaluator(validation_iterator, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm), trigger=interval)

    # (MN) Only rank 0 writes files and prints.
    if comm.rank == 0:
        log = extensions.LogReport(trigger=interval)
        trainer.extend(log)
        trainer.extend(extensions.snapshot(n_retains=1), trigger=interval)
        trainer.extend(extensions.PrintReport(
            ['epoch', 'main/loss', 'validation/main/loss',
             'main/accuracy', 'validation/main/accuracy', 'elapsed_time'], log))
        print(f'{comm.size} process{"es" * (comm.size > 1)}; '
              f'{len(train)} examples per process, in batches of {args.batchsize}')

    if args.resume:
        # Every process loads the snapshot that rank 0 wrote.
        chainer.serializers.load_npz(args.resume, trainer)

    trainer.run()

    if comm.rank == 0:
        print(f'Log and snapshot are in {pathlib.Path(args.out).resolve()}')
        print(f'Validation accuracy: {log.log[-1]["validation/main/accuracy"]:.2%}')


if __name__ == '__main__':
    main()
