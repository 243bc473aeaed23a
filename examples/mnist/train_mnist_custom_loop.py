"""Train the perceptron of train_mnist.py with a custom loop instead of Chainer's Trainer.

    mpiexec -n 2 python train_mnist_custom_loop.py

Changes for distributed training are marked with (MN).
"""

import argparse
import pathlib

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.backends import cuda
from train_mnist import DATASETS, MLP

import chainermn


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
    parser.add_argument('--iteration', type=int, help='stop after this number of steps')
    parser.add_argument('--unit', type=int, default=100, help='units in each hidden layer')
    parser.add_argument('--seed', type=int, default=0, help='random seed')
    parser.add_argument('--out', default='result', help='folder for model and optimizer')
    parser.add_argument('--resume', help='folder of an earlier run to resume')
    return parser.parse_args()


def evaluate(model, validation, device, comm):
    """Return the accuracy on the validation examples of all processes."""
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        n = len(validation)
        correct = 0.
        if n > 0:
            images, labels = chainer.dataset.concat_examples(validation[:], device)
            correct = float(F.accuracy(model.predictor(images), labels).array) * n
    # (MN) Sum over all processes. Every process gets the sums.
    correct, n = comm.allreduce(np.array([correct, n]))
    return correct / n


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

    model = L.Classifier(MLP(args.unit))
    model.to_device(device)
    # (MN) update() averages gradients over all processes before each step.
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    optimizer.setup(model)
    if args.resume:
        chainer.serializers.load_npz(pathlib.Path(args.resume, 'model.npz'), model)
        chainer.serializers.load_npz(pathlib.Path(args.resume, 'optimizer.npz'), optimizer)

    # (MN) Each process trains on its own shard. All shards have the same length, because every
    # process must call update() the same number of times.
    train, validation = DATASETS[args.dataset]() if comm.rank == 0 else (None, None)
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=args.seed)
    validation = chainermn.scatter_dataset(validation, comm, force_equal_length=False)
    iterator = chainer.iterators.SerialIterator(train, args.batchsize)

    for step, batch in enumerate(iterator, start=1):
        images, labels = chainer.dataset.concat_examples(batch, device)
        optimizer.update(model, images, labels)

        last = step == args.iteration or iterator.epoch == args.epoch
        if iterator.is_new_epoch or last:
            accuracy = evaluate(model, validation, device, comm)
            if comm.rank == 0:
                print(f'epoch {iterator.epoch:2}  loss {float(model.loss.array):.4f}  '
                      f'validation accuracy {accuracy:.2%}', flush=True)
        if last:
            break

    # (MN) All processes have the same parameters, so only rank 0 writes them.
    if comm.rank == 0:
        out = pathlib.Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        chainer.serializers.save_npz(out / 'model.npz', model)
        chainer.serializers.save_npz(out / 'optimizer.npz', optimizer)
        print(f'Model and optimizer are in {out.resolve()}')


if __name__ == '__main__':
    main()
