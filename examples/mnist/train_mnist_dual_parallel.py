"""Combine data and model parallelism: pairs of processes train copies of a two-stage model.

    mpiexec -n 4 python train_mnist_dual_parallel.py

The stages are those of train_mnist_model_parallel.py. The processes form a table, and each
belongs to two communicators, one for its row and one for its column:

                     stage 0      stage 1
      model 0       process 0    process 1      model_comm: sends activations
      model 1       process 2    process 3
      ...         data_comm: averages gradients
"""

import argparse
import pathlib
import sys

import chainer
import chainer.links as L
import numpy as np
from chainer import training
from chainer.backends import cuda
from chainer.training import extensions
from train_mnist import DATASETS
from train_mnist_model_parallel import FirstAndLast, Middle

import chainermn


def parse_arguments():
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--communicator', help='name of the communicator; '
                        'default: pure_nccl with --gpu, else flat')
    parser.add_argument('--gpu', action='store_true', help='use one GPU per process')
    parser.add_argument('--dataset', choices=DATASETS, default='digits')
    parser.add_argument('--batchsize', type=int, default=16, help='examples per model and step')
    parser.add_argument('--epoch', type=int, default=20, help='number of epochs')
    parser.add_argument('--iteration', type=int, help='stop after this number of steps')
    parser.add_argument('--unit', type=int, default=100, help='units in each hidden layer')
    parser.add_argument('--seed', type=int, default=0, help='random seed')
    parser.add_argument('--out', default='result', help='folder for log and snapshots')
    parser.add_argument('--autoload', action='store_true',
                        help='resume from the newest snapshots in --out, if there are any')
    return parser.parse_args()


def main():
    """Train the model. Every process runs this function."""
    args = parse_arguments()
    comm = chainermn.create_communicator(
        args.communicator or ('pure_nccl' if args.gpu else 'flat'))
    if comm.size % 2:
        sys.exit(f'Each model needs two processes, so start an even number, not {comm.size}.')
    device = chainer.get_device(
        comm.intra_rank % cuda.cupy.cuda.runtime.getDeviceCount() if args.gpu else '@numpy')
    device.use()
    np.random.seed(args.seed + comm.rank)

    # Processes that pass the same first argument form a communicator.
    model_index, stage_index = divmod(comm.rank, 2)
    model_comm = comm.split(model_index, comm.rank)
    data_comm = comm.split(stage_index, comm.rank)

    # Each model gets its own shard of the data. Processes 0 and 1 read the data.
    train, validation = DATASETS[args.dataset]() if data_comm.rank == 0 else (None, None)
    train = chainermn.scatter_dataset(train, data_comm, shuffle=True, seed=args.seed)
    validation = chainermn.scatter_dataset(validation, data_comm, force_equal_length=False)
    if stage_index == 0:
        model = L.Classifier(FirstAndLast(model_comm, args.unit))
    else:
        # Only the first stage reads examples. This stage needs a dataset of the same length.
        model = Middle(model_comm, args.unit)
        train = chainermn.datasets.create_empty_dataset(train)
        validation = chainermn.datasets.create_empty_dataset(validation)
    model.to_device(device)

    # Average gradients over the processes that have the same stage.
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), data_comm)
    optimizer.setup(model)

    # With --iteration, validate and save only at the end.
    stop = (args.iteration, 'iteration') if args.iteration else (args.epoch, 'epoch')
    interval = stop if args.iteration else (1, 'epoch')
    train_iterator = chainer.iterators.SerialIterator(train, args.batchsize)
    validation_iterator = chainer.iterators.SerialIterator(
        validation, max(1, len(validation)), repeat=False, shuffle=False)
    updater = training.updaters.StandardUpdater(train_iterator, optimizer, device=device)
    trainer = training.Trainer(updater, stop, out=args.out)

    evaluator = extensions.Evaluator(validation_iterator, model, device=device)
    trainer.extend(chainermn.extensions.create_multi_node_evaluator(evaluator, data_comm),
                   trigger=interval)

    # Processes with the same stage have the same parameters, so save one file per stage.
    stages = [range(stage, comm.size, 2) for stage in range(2)]
    trainer.extend(
        chainermn.extensions.multi_node_snapshot(
            comm, extensions.snapshot(n_retains=1, autoload=args.autoload), stages),
        trigger=interval)

    if comm.rank == 0:
        log = extensions.LogReport(trigger=interval)
        trainer.extend(log)
        trainer.extend(extensions.PrintReport(
            ['epoch', 'main/loss', 'validation/main/loss',
             'main/accuracy', 'validation/main/accuracy', 'elapsed_time'], log))
        print(f'{data_comm.size} model{"s" * (data_comm.size > 1)} of 2 stages; '
              f'{len(train)} examples per model, in batches of {args.batchsize}')

    trainer.run()

    if comm.rank == 0:
        print(f'Log and snapshots are in {pathlib.Path(args.out).resolve()}')
        print(f'Validation accuracy: {log.log[-1]["validation/main/accuracy"]:.2%}')


if __name__ == '__main__':
    main()
