"""Train a DCGAN, a generator and a discriminator, on images of digits.

    mpiexec -n 2 python train_dcgan.py

Changes for distributed training are marked with (MN).
"""

import argparse
import pathlib

import chainer
import numpy as np
from chainer import training
from chainer.backends import cuda
from chainer.training import extensions
from net import Discriminator, Generator
from updater import DCGANUpdater
from visualize import draw_sheet

import chainermn


def load_digits():
    """Return scikit-learn's 1,797 digits: 8x8 pixels with values from -1 to 1."""
    from sklearn import datasets

    images, _ = datasets.load_digits(return_X_y=True)
    return (images / 8 - 1).astype(np.float32).reshape(-1, 1, 8, 8)


def load_cifar10():
    """Return 50,000 color images of 32x32 pixels, which are downloaded on first use."""
    images, _ = chainer.datasets.get_cifar10(withlabel=False, scale=2.)
    return images - 1


DATASETS = {'digits': load_digits, 'cifar10': load_cifar10}


def parse_arguments():
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--communicator', help='name of the communicator; '
                        'default: pure_nccl with --gpu, else flat')
    parser.add_argument('--gpu', action='store_true', help='use one GPU per process')
    parser.add_argument('--dataset', choices=DATASETS, default='digits')
    parser.add_argument('--batchsize', type=int, default=32, help='images per process and step')
    parser.add_argument('--epoch', type=int, default=30, help='number of epochs')
    parser.add_argument('--iteration', type=int, help='stop after this number of steps')
    parser.add_argument('--n-hidden', '--n_hidden', type=int, default=32,
                        help='size of the random input of the generator')
    parser.add_argument('--width', type=int, default=32, help='channels of the widest images')
    parser.add_argument('--seed', type=int, default=0, help='random seed')
    parser.add_argument('--out', default='result', help='folder for log, previews and snapshots')
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

    # (MN) Use a different seed on each process, so that they draw different noise.
    np.random.seed(args.seed + comm.rank)
    if args.gpu:
        cuda.cupy.random.seed(args.seed + comm.rank)

    # (MN) Rank 0 reads the data and sends each process a shard.
    images = DATASETS[args.dataset]() if comm.rank == 0 else None
    images = chainermn.scatter_dataset(images, comm, shuffle=True, seed=args.seed)
    channels, size, _ = images[0].shape
    iterator = chainer.iterators.SerialIterator(images, args.batchsize)

    generator = Generator(args.n_hidden, channels, size, args.width)
    discriminator = Discriminator(channels, args.width)
    optimizers = {}
    for name, model in ('gen', generator), ('dis', discriminator):
        model.to_device(device)
        # (MN) Each optimizer averages the gradients of its own network.
        optimizers[name] = chainermn.create_multi_node_optimizer(
            chainer.optimizers.Adam(2e-4, beta1=0.5), comm)
        optimizers[name].setup(model)

    # With --iteration, log, draw and save only at the end.
    stop = (args.iteration, 'iteration') if args.iteration else (args.epoch, 'epoch')
    interval = stop if args.iteration else (1, 'epoch')
    updater = DCGANUpdater(iterator, optimizers, device=device)
    trainer = training.Trainer(updater, stop, out=args.out)

    # (MN) To draw images, the generator uses the moving averages of batch normalization, which
    # differ between processes. Average them first.
    trainer.extend(chainermn.extensions.AllreducePersistent(generator, comm), trigger=interval)

    # (MN) Only rank 0 writes files and prints.
    if comm.rank == 0:
        log = extensions.LogReport(trigger=interval)
        trainer.extend(log)
        trainer.extend(extensions.snapshot(n_retains=1), trigger=interval)
        trainer.extend(draw_sheet(generator), trigger=interval)
        trainer.extend(extensions.PrintReport(
            ['epoch', 'iteration', 'gen/loss', 'dis/loss', 'elapsed_time'], log))
        print(f'{comm.size} process{"es" * (comm.size > 1)}; '
              f'{len(images)} images per process, in batches of {args.batchsize}')

    if args.resume:
        # Every process loads the snapshot that rank 0 wrote.
        chainer.serializers.load_npz(args.resume, trainer)

    trainer.run()

    if comm.rank == 0:
        print(f'Drawn images are in {pathlib.Path(args.out, "preview").resolve()}')


if __name__ == '__main__':
    main()
