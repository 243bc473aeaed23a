"""Train a translation model (encoder and decoder) with data parallelism.

    mpiexec -n 2 python seq2seq.py

Changes for distributed training are marked with (MN). seq2seq_mp1.py runs encoder and decoder on
separate processes instead.
"""

import argparse
import pathlib

import bleu
import chainer
import data
import net
import numpy as np
from chainer import training
from chainer.backends import cuda
from chainer.training import extensions

import chainermn


class Translator(chainer.Chain):
    """Encoder and decoder."""

    def __init__(self, n_layers, source, target, n_units):
        super().__init__()
        with self.init_scope():
            self.encoder = net.Encoder(n_layers, len(source), n_units)
            self.decoder = net.Decoder(n_layers, len(target), n_units, target[data.END])

    def forward(self, xs, ys):
        """Return the loss."""
        h, c, _ = self.encoder.rnn(None, None, self.encoder.inputs(xs))
        _, _, outputs = self.decoder.rnn(h, c, self.decoder.inputs(ys))
        return self.decoder.loss(outputs, ys)

    def translate(self, xs):
        """Return the translation of each sentence, as a list of word numbers."""
        h, c, _ = self.encoder.rnn(None, None, self.encoder.inputs(xs))
        return self.decoder.write(h, c)


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
    parser.add_argument('--batchsize', type=int, default=32, help='pairs per process and step')
    parser.add_argument('--epoch', type=int, default=10, help='number of epochs')
    parser.add_argument('--iteration', type=int, help='stop after this number of steps')
    parser.add_argument('--layer', type=int, default=1, help='layers of each LSTM')
    parser.add_argument('--unit', type=int, default=64, help='units in each layer')
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

    # (MN) Rank 0 reads the data, broadcasts the vocabularies, which are Python objects, and sends
    # each process a shard.
    source = target = train = validation = None
    if comm.rank == 0:
        train, validation = data.load(args.files)
        source = data.make_vocabulary([x for x, _ in train], args.vocabulary)
        target = data.make_vocabulary([y for _, y in train], args.vocabulary)
        train = data.numbered(train, source, target)
        validation = data.numbered(validation, source, target)
    source, target = comm.bcast_obj((source, target))
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=args.seed)
    validation = chainermn.scatter_dataset(validation, comm, force_equal_length=False)
    train_iterator = chainer.iterators.SerialIterator(train, args.batchsize)
    validation_iterator = chainer.iterators.SerialIterator(
        validation, args.batchsize, repeat=False, shuffle=False)

    model = Translator(args.layer, source, target, args.unit)
    model.to_device(device)
    # (MN) Average gradients over all processes, then clip the averages.
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(0.005), comm)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5))

    # With --iteration, validate and save only at the end.
    stop = (args.iteration, 'iteration') if args.iteration else (args.epoch, 'epoch')
    interval = stop if args.iteration else (1, 'epoch')
    updater = training.updaters.StandardUpdater(
        train_iterator, optimizer, converter=data.convert, device=device)
    trainer = training.Trainer(updater, stop, out=args.out)

    # (MN) BLEU needs the counts of all sentences: each process counts, and rank 0 computes BLEU.
    trainer.extend(
        bleu.BleuEvaluator(comm, validation_iterator, model, device, data.convert),
        trigger=interval)

    # (MN) Only rank 0 writes files and prints.
    if comm.rank == 0:
        log = extensions.LogReport(trigger=interval)
        trainer.extend(log)
        trainer.extend(extensions.snapshot(n_retains=1), trigger=interval)
        trainer.extend(extensions.PrintReport(
            ['epoch', 'main/decoder/loss', 'validation/bleu', 'elapsed_time'], log))
        print(f'{comm.size} process{"es" * (comm.size > 1)}; '
              f'{len(train)} pairs per process, in batches of {args.batchsize}')

    if args.resume:
        # Every process loads the snapshot that rank 0 wrote.
        chainer.serializers.load_npz(args.resume, trainer)

    trainer.run()

    if comm.rank == 0:
        pairs = validation[:3]
        with chainer.using_config('train', False), chainer.no_backprop_mode():
            translations = model.translate(data.convert(pairs, device)['xs'])
        source_words, target_words = list(source), list(target)
        for (x, _), y in zip(pairs, translations, strict=True):
            print(*(source_words[word] for word in x), '->', *(target_words[word] for word in y))
        print(f'Log and snapshot are in {pathlib.Path(args.out).resolve()}')
        print(f'BLEU: {log.log[-1]["validation/bleu"]:.2%}')


if __name__ == '__main__':
    main()
