"""Train a three-layer perceptron on handwritten digits with data parallelism.

    mpiexec -n 2 python train_mnist.py

Changes for distributed training are marked with (MN); the rest is a plain Chainer script.
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


class MLP(chainer.Chain):
    """Computes the scores of the ten digits for images, which are flat arrays of pixels."""

    def __init__(self, n_units):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(None, n_units)  # the first batch determines the input size
            self.l2 = L.Linear(n_units, n_units)
            self.l3 = L.Linear(n_units, 10)

    def forward(self, x):
        h = F.relu(self.l1(x))
        h = F.relu(self.l2(h))
        return self.l3(h)


def load_digits():
    """Return scikit-learn's 1,797 digits of 8x8 pixels: 80% for training, 20% for validation."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    labels = labels.astype(np.int32)
    order = np.random.RandomState(0).permutation(len(labels))
    train, validation = order[:1437], order[1437:]
    return (chainer.datasets.TupleDataset(images[train], labels[train]),
            chainer.datasets.TupleDataset(images[validation], labels[validation]))


DATASETS = {
    'digits': load_digits,
    'mnist': chainer.datasets.get_mnist,  # downloaded on first use
}


def parse_arguments():
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--communicator', help='name of the communicator; '
                        'default: pure_nccl with --gpu, else flat')
    parser.add_argument('--gpu', action='store_true', help='use one GPU per process')
    parser.add_argument('--dataset', choices=DATASETS, default='digits')
    parser.add_argument('--batchsize', type=int, default=16, help='examples per process and step')
    parser.add_argument('--epoch', type=int, default=20, help='number of epochs')
    parser.add_argument('--unit', type=int, default=100, help='units in each hidden layer')
    parser.add_argument('--seed', type=int, default=0, help='random seed')
    parser.add_argument('--out', default='result', help='folder for logs, plots and snapshots')
    parser.add_argument('--no-progress-bar', action='store_true', help='for output to a file')
    parser.add_argument('--resume', help='snapshot to resume from')
    return parser.parse_args()


def main():
    """Train the model. Every process runs this function."""
    args = parse_arguments()

    # (MN) Create one communicator for all processes. With --gpu, the n-th process of a node selects
    # the n-th GPU of the node before any other code uses a GPU.
    comm = chainermn.create_communicator(
        args.communicator or ('pure_nccl' if args.gpu else 'flat'))
    device = chainer.get_device(
        comm.intra_rank % cuda.cupy.cuda.runtime.getDeviceCount() if args.gpu else '@numpy')
    device.use()

    # Initial weights differ between processes. The first update copies the weights of rank 0.
    np.random.seed(args.seed + comm.rank)
    if args.gpu:
        cuda.cupy.random.seed(args.seed + comm.rank)

    model = L.Classifier(MLP(args.unit))
    model.to_device(device)
    # (MN) Average gradients over all processes before each step.
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    optimizer.setup(model)

    # (MN) Rank 0 reads the data and sends each process a shard. All training shards must have the
    # same length. In the validation shards, each example should occur only once.
    train, validation = DATASETS[args.dataset]() if comm.rank == 0 else (None, None)
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=args.seed)
    validation = chainermn.scatter_dataset(validation, comm, force_equal_length=False)
    train_iterator = chainer.iterators.SerialIterator(train, args.batchsize)
    # Use a single batch: Chainer's evaluator averages the means of the batches, so the examples of
    # a smaller last batch would have a larger weight.
    validation_iterator = chainer.iterators.SerialIterator(
        validation, max(1, len(validation)), repeat=False, shuffle=False)

    updater = training.updaters.StandardUpdater(train_iterator, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, 'epoch'), out=args.out)

    # (MN) Validate on all processes. Each gets the result for the whole validation set.
    evaluator = extensions.Evaluator(validation_iterator, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))

    # (MN) Reports cover all processes. Only rank 0 writes and prints them.
    log = extensions.LogReport()
    reports = [log, extensions.PrintReport(
        ['epoch', 'main/loss', 'validation/main/loss',
         'main/accuracy', 'validation/main/accuracy', 'elapsed_time'])]
    if extensions.PlotReport.available():
        reports += [extensions.PlotReport(
            [f'main/{name}', f'validation/main/{name}'], 'epoch', filename=f'{name}.png')
            for name in ('loss', 'accuracy')]
    if not args.no_progress_bar:
        reports.append(extensions.ProgressBar(update_interval=20))
    for report in reports:
        trainer.extend(chainermn.extensions.create_multi_node_report(report, comm))

    # (MN) Only rank 0 writes snapshots.
    if comm.rank == 0:
        trainer.extend(extensions.snapshot(n_retains=1), trigger=(1, 'epoch'))
        print(f'{comm.size} process{"es" * (comm.size > 1)}, {type(comm).__name__}, {device}; '
              f'{len(train)} examples per process, in batches of {args.batchsize}')

    if args.resume:
        # Every process loads the snapshot that rank 0 wrote.
        chainer.serializers.load_npz(args.resume, trainer)

    trainer.run()

    if comm.rank == 0:
        print(f'Logs, plots and the last snapshot are in {pathlib.Path(args.out).resolve()}')
        print(f'Validation accuracy: {log.log[-1]["validation/main/accuracy"]:.2%}')


if __name__ == '__main__':
    main()
