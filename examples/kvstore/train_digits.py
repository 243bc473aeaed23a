"""Train a perceptron on handwritten digits, with gradients sent through a KVStore.

    mpiexec -n 2 python train_digits.py --kvstore dist_async

Changes for distributed training are marked with (MN).
"""

import argparse
import pathlib

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions

import chainermn


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


def parse_arguments():
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--kvstore', choices=['local', 'dist_sync', 'dist_async'],
                        default='dist_sync', help='type of the store')
    parser.add_argument('--compression', type=float, metavar='THRESHOLD',
                        help='threshold of 2-bit compression; default: no compression')
    parser.add_argument('--batchsize', type=int, default=16, help='examples per process and step')
    parser.add_argument('--epoch', type=int, default=20, help='number of epochs')
    parser.add_argument('--iteration', type=int, help='stop after this number of steps')
    parser.add_argument('--unit', type=int, default=100, help='units in each hidden layer')
    parser.add_argument('--seed', type=int, default=0, help='random seed')
    parser.add_argument('--out', default='result', help='folder for log and model')
    return parser.parse_args()


def main():
    """Train the model. Every process runs this function."""
    args = parse_arguments()
    np.random.seed(args.seed)

    # (MN) Create one communicator and one store for all processes.
    comm = chainermn.create_communicator('flat')
    kvstore = chainermn.kvstore.create(args.kvstore, comm)
    if args.compression:
        kvstore.set_gradient_compression({'type': '2bit', 'threshold': args.compression})

    model = L.Classifier(chainer.Sequential(
        L.Linear(None, args.unit), F.relu, L.Linear(args.unit, args.unit), F.relu,
        L.Linear(args.unit, 10)))
    # (MN) Push gradients to the store.
    optimizer = chainermn.kvstore.create_kvstore_optimizer(chainer.optimizers.Adam(), kvstore)
    optimizer.setup(model)

    # (MN) Each process trains on its own shard.
    train, validation = load_digits() if comm.rank == 0 else (None, None)
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=args.seed)
    validation = chainermn.scatter_dataset(validation, comm, force_equal_length=False)
    iterator = chainer.iterators.SerialIterator(train, args.batchsize)
    updater = training.updaters.StandardUpdater(iterator, optimizer)
    stop = (args.iteration, 'iteration') if args.iteration else (args.epoch, 'epoch')
    trainer = training.Trainer(updater, stop, out=args.out)
    # (MN) Only rank 0 writes files and prints.
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(
            ['epoch', 'main/loss', 'main/accuracy', 'elapsed_time']))
    trainer.run()

    if args.kvstore == 'dist_async':
        # (MN) Processes finish at different times. Wait for all, then pull the final weights.
        kvstore.barrier()
        paths, parameters = zip(*model.namedparams(), strict=True)
        kvstore.pull(paths, [parameter.array for parameter in parameters])

    # (MN) Each process validates on its shard. The counts are summed over all processes.
    correct = 0.
    n = len(validation)
    if n > 0:
        images, labels = chainer.dataset.concat_examples(validation[:])
        with chainer.using_config('train', False), chainer.no_backprop_mode():
            correct = float(F.accuracy(model.predictor(images), labels).array) * n
    correct, n = comm.allreduce(np.array([correct, n]))
    if comm.rank == 0:
        out = pathlib.Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        chainer.serializers.save_npz(out / 'model.npz', model)
        print(f'The model is in {out.resolve()}')
        print(f'Validation accuracy: {correct / n:.2%}')


if __name__ == '__main__':
    main()
