"""Train from a hundred files of digits. No process keeps all of them in memory.

    mpiexec -n 2 python train_sharded.py

The relevant lines are marked with (SHARDS).
"""

import argparse
import pathlib

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.backends import cuda
from chainer.training import extensions
from sklearn.datasets import load_digits

import chainermn


def parse_arguments():
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--communicator', help='name of the communicator; '
                        'default: pure_nccl with --gpu, else flat')
    parser.add_argument('--gpu', action='store_true', help='use one GPU per process')
    parser.add_argument('--batchsize', type=int, default=16, help='examples per process and step')
    parser.add_argument('--epoch', type=int, default=20, help='number of epochs')
    parser.add_argument('--iteration', type=int, help='maximum number of iterations')
    parser.add_argument('--buffer', type=int, default=16,
                        help='number of files whose examples are mixed')
    parser.add_argument('--skip-broken', action='store_true',
                        help='skip and count samples that cannot be read')
    parser.add_argument('--seed', type=int, default=0, help='random seed')
    parser.add_argument('--data', default='digits', help='folder for the files')
    parser.add_argument('--out', default='result', help='folder for the log and the checkpoints')
    return parser.parse_args()


def write_files(folder, comm):
    """(SHARDS) Write the digits to about a hundred files. Every process writes some of them."""
    images, labels = load_digits(return_X_y=True)
    digits = chainer.datasets.TupleDataset((images / 16).astype('f'), labels.astype('i'))
    order = np.random.RandomState(0).permutation(len(digits))
    n_train = len(digits) * 8 // 9
    for name, begin, end in [('train', 0, n_train), ('test', n_train, len(digits))]:
        first, last = chainermn.scatter_index(end - begin, comm, force_equal_length=False)
        mine = chainer.datasets.SubDataset(digits, begin + first, begin + last, order)
        chainermn.datasets.write_shards(
            mine, folder / name, samples_per_shard=16, comm=comm, overwrite=True)


def main():
    """Train the model. Every process runs this function."""
    args = parse_arguments()
    comm = chainermn.create_communicator(
        args.communicator or ('pure_nccl' if args.gpu else 'flat'))
    device = chainer.get_device(
        comm.intra_rank % cuda.cupy.cuda.runtime.getDeviceCount() if args.gpu else '@numpy')
    device.use()
    np.random.seed(args.seed)

    folder = pathlib.Path(args.data)
    if not comm.bcast_obj((folder / 'test.index.json').exists() if comm.rank == 0 else None):
        folder.mkdir(parents=True, exist_ok=True)
        write_files(folder, comm)

    model = L.Classifier(chainer.Sequential(L.Linear(None, 100), F.relu, L.Linear(None, 10)))
    model.to_device(device)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.05), comm).setup(model)

    # (SHARDS) All processes pass the same pattern. Each opens only the files that it needs next.
    train = chainermn.iterators.ShardedIterator(
        folder / 'train-*.npz', args.batchsize, comm, seed=args.seed, buffer=args.buffer,
        on_error='skip' if args.skip_broken else 'raise')
    test = chainermn.iterators.ShardedIterator(
        folder / 'test-*.npz', args.batchsize, comm, repeat=False, shuffle=False)

    updater = chainer.training.StandardUpdater(train, optimizer, device=device)
    stop = (args.iteration, 'iteration') if args.iteration else (args.epoch, 'epoch')
    trainer = chainer.training.Trainer(updater, stop, out=args.out)
    trainer.extend(chainermn.create_multi_node_evaluator(
        extensions.Evaluator(test, model, device=device), comm))
    trainer.extend(chainermn.extensions.create_multi_node_report(
        extensions.LogReport(trigger=(1, 'epoch')), comm))
    trainer.extend(chainermn.extensions.create_multi_node_report(extensions.PrintReport(
        ['epoch', 'iteration', 'main/loss', 'validation/main/accuracy', 'skipped_samples']), comm))

    # (SHARDS) A job that was killed resumes at the same sample, on any number of processes.
    checkpointer = chainermn.create_multi_node_checkpointer('sharded', comm, path=args.out)
    trainer.extend(checkpointer, trigger=(50, 'iteration'))
    checkpointer.maybe_load(trainer, optimizer)
    trainer.run()
    if comm.rank == 0:
        print(f'stopped after {updater.iteration} iterations, {updater.epoch_detail:.3f} epochs')


if __name__ == '__main__':
    main()
