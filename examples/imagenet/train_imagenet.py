"""Train an image classifier on image files, with data loading processes.

    python make_images.py
    mpiexec -n 2 python train_imagenet.py

Changes for distributed training are marked with (MN).
"""

import argparse
import multiprocessing
import pathlib

import chainer
import chainer.links as L
import numpy as np
from chainer import training
from chainer.backends import cuda
from chainer.training import extensions
from crops import Crops
from models import ResNet50, Tiny

import chainermn

MODELS = {'tiny': Tiny, 'resnet50': ResNet50}
DTYPES = {'float32': np.float32, 'float16': np.float16, 'mixed16': chainer.mixed16}


def parse_arguments():
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('train', nargs='?', default='images/train.txt',
                        help='list of training images and labels')
    parser.add_argument('val', nargs='?', default='images/val.txt',
                        help='list of validation images and labels')
    parser.add_argument('--root', default='images',
                        help='folder that the listed paths are relative to')
    parser.add_argument('--mean', help='output of compute_mean.py; default: gray')
    parser.add_argument('--arch', choices=MODELS, default='tiny')
    parser.add_argument('--insize', type=int, default=56, help='size of the square crops, '
                        'in pixels')
    parser.add_argument('--dtype', choices=DTYPES, default='float32',
                        help='mixed16: computes in float16, updates in float32')
    parser.add_argument('--communicator', help='name of the communicator; '
                        'default: pure_nccl with --gpu, else flat')
    parser.add_argument('--gpu', action='store_true', help='use one GPU per process')
    parser.add_argument('--batchsize', type=int, default=10, help='images per process and step')
    parser.add_argument('--val-batchsize', '--val_batchsize', type=int, default=50,
                        help='validation images per process and step')
    parser.add_argument('--learnrate', type=float, help='learning rate, divided by 10 every '
                        '30 epochs; default: 0.1 times the total batch size / 256')
    parser.add_argument('--epoch', type=int, default=10, help='number of epochs')
    parser.add_argument('--iteration', type=int, help='stop after this number of steps')
    parser.add_argument('--loaderjob', type=int, default=2,
                        help='data loading processes per rank')
    parser.add_argument('--seed', type=int, default=0, help='random seed')
    parser.add_argument('--out', default='result', help='folder for log and snapshots')
    parser.add_argument('--autoload', action='store_true',
                        help='resume from the newest snapshot in --out, if there is one')
    return parser.parse_args()


def main():
    """Train the model. Every process runs this function."""
    args = parse_arguments()

    # (MN) A process that uses MPI must not fork: the child would get a copy of MPI's memory and
    # connections. So start the data loading processes from a fork server, and start the server
    # before MPI is initialized.
    multiprocessing.set_start_method('forkserver')
    first = multiprocessing.Process()
    first.start()
    first.join()

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

    # (MN) Rank 0 reads the lists and sends each process the paths and labels of its shard. Images
    # are opened only when they are needed.
    train = validation = n_classes = None
    if comm.rank == 0:
        train = chainer.datasets.LabeledImageDataset(args.train, args.root, np.float32)
        validation = chainer.datasets.LabeledImageDataset(args.val, args.root, np.float32)
        lines = pathlib.Path(args.train).read_text().splitlines()
        n_classes = 1 + max(int(line.split()[1]) for line in lines)
    n_classes = comm.bcast_obj(n_classes)
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=args.seed)
    validation = chainermn.scatter_dataset(validation, comm, force_equal_length=False)

    chainer.global_config.dtype = DTYPES[args.dtype]
    mean = np.load(args.mean) if args.mean else np.float32(128)
    train = Crops(train, mean, args.insize, random=True, dtype=chainer.get_dtype())
    validation = Crops(validation, mean, args.insize, random=False, dtype=chainer.get_dtype())
    train_iterator = chainer.iterators.MultiprocessIterator(
        train, args.batchsize, n_processes=args.loaderjob)
    validation_iterator = chainer.iterators.MultiprocessIterator(
        validation, args.val_batchsize, repeat=False, shuffle=False, n_processes=args.loaderjob)

    model = L.Classifier(MODELS[args.arch](n_classes))
    model.to_device(device)
    learnrate = args.learnrate or 0.1 * args.batchsize * comm.size / 256
    # (MN) Average gradients over all processes, in the dtype of the parameters.
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(learnrate), comm)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))
    if chainer.get_dtype() == np.float16:
        optimizer.use_fp32_update()  # float16 would lose small steps
        optimizer.loss_scaling()  # float16 would lose small gradients

    # With --iteration, validate and save only at the end.
    stop = (args.iteration, 'iteration') if args.iteration else (args.epoch, 'epoch')
    interval = stop if args.iteration else (1, 'epoch')
    updater = training.updaters.StandardUpdater(train_iterator, optimizer, device=device)
    trainer = training.Trainer(updater, stop, out=args.out)
    trainer.extend(extensions.ExponentialShift('lr', 0.1), trigger=(30, 'epoch'))

    # (MN) Average the moving averages of batch normalization over all processes before each use.
    trainer.extend(chainermn.extensions.AllreducePersistent(model, comm), trigger=interval)
    # (MN) Validate on all processes. Each gets the result for the whole validation set.
    evaluator = extensions.Evaluator(validation_iterator, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm), trigger=interval)
    # (MN) Save one file for all processes. All of them resume from it.
    trainer.extend(
        chainermn.extensions.multi_node_snapshot(
            comm, extensions.snapshot(n_retains=2, autoload=args.autoload), []),
        trigger=interval)

    # (MN) Only rank 0 prints.
    if comm.rank == 0:
        log = extensions.LogReport(trigger=interval)
        trainer.extend(log)
        trainer.extend(extensions.observe_lr(), trigger=interval)
        trainer.extend(extensions.PrintReport(
            ['epoch', 'iteration', 'main/loss', 'validation/main/loss',
             'main/accuracy', 'validation/main/accuracy', 'lr', 'elapsed_time'], log))
        print(f'{comm.size} process{"es" * (comm.size > 1)} with {args.loaderjob} readers each; '
              f'{len(train)} images per process, in batches of {args.batchsize}')

    trainer.run()

    if comm.rank == 0:
        print(f'Log and snapshots are in {pathlib.Path(args.out).resolve()}')
        print(f'Validation accuracy: {log.log[-1]["validation/main/accuracy"]:.2%}')


if __name__ == '__main__':
    main()
