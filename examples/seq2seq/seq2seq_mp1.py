"""Train a translation model with encoder and decoder on separate processes.

    mpiexec -n 2 python seq2seq_mp1.py

The final states of the encoder's LSTM on process 0 are the initial states of the decoder's LSTM on
process 1. Changes for distributed training are marked with (MN).
"""

import argparse
import sys

import bleu
import chainer
import data
import net
import numpy as np
from chainer import training
from chainer.backends import cuda
from chainer.training import extensions

import chainermn


class EncoderOn0(net.Encoder):
    """On process 0: reads sentences and sends its final states to process 1."""

    def __init__(self, comm, n_layers, n_words, n_units):
        super().__init__(n_layers, n_words, n_units)
        # (MN) Do not use init_scope: self.rnn already has these parameters.
        self.sending_rnn = chainermn.links.create_multi_node_n_step_rnn(
            self.rnn, comm, rank_out=1)

    def forward(self, xs, ys):
        """Return an empty Variable instead of a loss. Backward starts from it."""
        *_, delegate = self.sending_rnn(self.inputs(xs))
        return delegate

    def translate(self, xs):
        """Send the states. Return no translations, because process 1 writes them."""
        self.sending_rnn(self.inputs(xs))
        return []


class DecoderOn1(net.Decoder):
    """On process 1: receives the states of process 0 and writes sentences."""

    def __init__(self, comm, n_layers, n_words, n_units, end):
        super().__init__(n_layers, n_words, n_units, end)
        self.comm = comm
        self.receiving_rnn = chainermn.links.create_multi_node_n_step_rnn(
            self.rnn, comm, rank_in=0)

    def forward(self, xs, ys):
        """Return the loss."""
        _, _, outputs, _ = self.receiving_rnn(self.inputs(ys))
        return self.loss(outputs, ys)

    def translate(self, xs):
        """Return the translation of each sentence on process 0, as a list of word numbers."""
        # (MN) Receive the states once. Each call of receiving_rnn would wait for new ones.
        h, c = chainermn.functions.recv(self.comm, 0)
        return self.write(h, c)


def parse_arguments():
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--communicator', help='name of the communicator; '
                        'default: pure_nccl with --gpu, else flat')
    parser.add_argument('--gpu', action='store_true', help='use one GPU per process')
    parser.add_argument('--files', nargs=4, help='training sentences, their translations, '
                        'validation sentences and their translations: one sentence per line, with '
                        'spaces between words; default: generated data')
    parser.add_argument('--vocabulary', type=int, default=40000,
                        help='maximum vocabulary size per language')
    parser.add_argument('--batchsize', type=int, default=64, help='pairs per step')
    parser.add_argument('--epoch', type=int, default=10, help='number of epochs')
    parser.add_argument('--iteration', type=int, help='stop after this number of steps')
    parser.add_argument('--layer', type=int, default=1, help='layers of each LSTM')
    parser.add_argument('--unit', type=int, default=64, help='units in each layer')
    parser.add_argument('--seed', type=int, default=0, help='random seed')
    parser.add_argument('--out', default='result', help='folder for the log')
    return parser.parse_args()


def main():
    """Train the model. Both processes run this function."""
    args = parse_arguments()
    comm = chainermn.create_communicator(
        args.communicator or ('pure_nccl' if args.gpu else 'flat'))
    if comm.size != 2:
        sys.exit(f'This example needs two processes, not {comm.size}. Start it with mpiexec -n 2.')
    device = chainer.get_device(
        comm.intra_rank % cuda.cupy.cuda.runtime.getDeviceCount() if args.gpu else '@numpy')
    device.use()
    np.random.seed(args.seed + comm.rank)

    # (MN) Process 0 reads the data. Process 1 needs only the vocabularies and the lengths.
    source = target = train = validation = None
    if comm.rank == 0:
        train, validation = data.load(args.files)
        source = data.make_vocabulary([x for x, _ in train], args.vocabulary)
        target = data.make_vocabulary([y for _, y in train], args.vocabulary)
        train = data.numbered(train, source, target)
        validation = data.numbered(validation, source, target)
    source, target = comm.bcast_obj((source, target))
    lengths = comm.bcast_obj(None if train is None else (len(train), len(validation)))
    if comm.rank == 1:
        train, validation = (chainermn.datasets.create_empty_dataset(range(n)) for n in lengths)

    # (MN) Process 1 gets the batches of process 0, because it needs their translations.
    train_iterator = chainermn.iterators.create_multi_node_iterator(
        chainer.iterators.SerialIterator(train, args.batchsize), comm)
    validation_iterator = chainermn.iterators.create_multi_node_iterator(
        chainer.iterators.SerialIterator(validation, args.batchsize, repeat=False, shuffle=False),
        comm)

    if comm.rank == 0:
        model = EncoderOn0(comm, args.layer, len(source), args.unit)
    else:
        model = DecoderOn1(comm, args.layer, len(target), args.unit, target[data.END])
    model.to_device(device)
    # (MN) Use an ordinary optimizer: no two processes share a parameter, so nothing is averaged.
    optimizer = chainer.optimizers.Adam(0.005).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5))

    # With --iteration, validate only at the end.
    stop = (args.iteration, 'iteration') if args.iteration else (args.epoch, 'epoch')
    interval = stop if args.iteration else (1, 'epoch')
    updater = training.updaters.StandardUpdater(
        train_iterator, optimizer, converter=data.convert, device=device)
    trainer = training.Trainer(updater, stop, out=args.out)
    trainer.extend(
        bleu.BleuEvaluator(comm, validation_iterator, model, device, data.convert, root=1),
        trigger=interval)

    # (MN) Process 1 has the loss.
    if comm.rank == 1:
        log = extensions.LogReport(trigger=interval)
        trainer.extend(log)
        trainer.extend(extensions.PrintReport(
            ['epoch', 'main/loss', 'validation/bleu', 'elapsed_time'], log))

    trainer.run()

    if comm.rank == 1:
        print(f'BLEU: {log.log[-1]["validation/bleu"]:.2%}')


if __name__ == '__main__':
    main()
