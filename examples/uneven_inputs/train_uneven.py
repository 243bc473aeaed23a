"""Train with different numbers of batches per process.

    mpiexec -n 2 python train_uneven.py

The relevant lines are marked with (JOIN).
"""

import argparse
import itertools
import pathlib

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.backends import cuda
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
    parser.add_argument('--iteration', type=int, help='maximum number of batches per epoch')
    parser.add_argument('--divide-by-active', action='store_true',
                        help='average over the processes that still have batches')
    parser.add_argument('--n-accumulations', type=int, default=1, help='number of batches per step')
    parser.add_argument('--compression', choices=['fp16', 'bf16', '2bit'],
                        help='compression of gradients')
    parser.add_argument('--threshold', type=float, default=0.05,
                        help='threshold of 2bit compression')
    parser.add_argument('--seed', type=int, default=0, help='random seed')
    parser.add_argument('--out', default='result', help='folder for the model')
    return parser.parse_args()


def own_part(n, comm):
    """Return the indices of this process's examples: rank r gets r + 1 shares."""
    shares = range(1, comm.size + 1)
    ends = [n * share // sum(shares) for share in itertools.accumulate(shares, initial=0)]
    return np.arange(ends[comm.rank], ends[comm.rank + 1])


def main():
    """Train the model. Every process runs this function."""
    args = parse_arguments()
    comm = chainermn.create_communicator(
        args.communicator or ('pure_nccl' if args.gpu else 'flat'))
    device = chainer.get_device(
        comm.intra_rank % cuda.cupy.cuda.runtime.getDeviceCount() if args.gpu else '@numpy')
    device.use()
    np.random.seed(args.seed + comm.rank)

    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(args.seed).permutation(len(images))
    images, labels = (images[order] / 16).astype('f'), labels[order].astype('i')
    n_train = len(images) * 4 // 5
    mine = own_part(n_train, comm)

    model = L.Classifier(chainer.Sequential(L.Linear(None, 100), F.relu, L.Linear(None, 10)))
    model.to_device(device)
    compression = args.compression
    if compression == '2bit':
        compression = {'type': '2bit', 'threshold': args.threshold}
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.05), comm, n_accumulations=args.n_accumulations,
        compression=compression).setup(model)

    for epoch in range(1, args.epoch + 1):
        batches = np.array_split(np.random.permutation(mine), -(-len(mine) // args.batchsize))
        # (JOIN) A process that has used all of its batches waits at the end of this block and takes
        # part in the updates of the others. Do not call any other collective in the block.
        with chainermn.join(
                optimizer, divide_by_initial_world_size=not args.divide_by_active):
            for batch in batches[:args.iteration]:
                optimizer.update(model, device.send(images[batch]), device.send(labels[batch]))
        # (JOIN) Now all processes have finished the epoch and have the same model.

        with chainer.using_config('train', False), chainer.no_backprop_mode():
            model(device.send(images[n_train:]), device.send(labels[n_train:]))
        accuracies = comm.allgather_obj(float(model.accuracy.array))
        numbers = comm.gather_obj(len(batches[:args.iteration]))
        if comm.rank == 0:
            assert len(set(accuracies)) == 1
            print(f'epoch {epoch:2}  batches per process {numbers}  steps so far '
                  f'{optimizer.t}  validation accuracy {accuracies[0]:.2%}', flush=True)

    if comm.rank == 0:
        out = pathlib.Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        chainer.serializers.save_npz(out / 'model.npz', model)


if __name__ == '__main__':
    main()
