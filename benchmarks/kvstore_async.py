"""Does a slow rank delay the others? ``dist_async`` with and without a rank that sleeps.

``mpiexec -n 4 python benchmarks/kvstore_async.py [--rounds 7] [--seconds 3] [--sleep 50]``

All ranks train a perceptron on the digits of scikit-learn, with the optimizer on a ``dist_async``
store, which is sharded over the ranks. In every other round, the last rank sleeps in each of its
steps. The output shows the steps per second of the last rank and of the other ranks, the median
ratio of the pairs of rounds, and the final accuracy.
"""

import argparse
import statistics
import time

import _rounds
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from sklearn import datasets

import chainermn


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=7,
                        help='pairs of rounds; default: %(default)s')
    parser.add_argument('--seconds', type=float, default=3,
                        help='seconds per round; default: %(default)s')
    parser.add_argument('--sleep', type=float, default=50,
                        help='milliseconds that the slow rank sleeps in each step; '
                             'default: %(default)s')
    parser.add_argument('--quick', action='store_true', help='one short round, as a test')
    parser.add_argument('--svg', metavar='FILE', help='plot the ratios of all rounds (matplotlib)')
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, .2
    comm = chainermn.create_communicator('flat')
    if comm.size < 2:
        raise SystemExit('start it with mpiexec, on at least 2 ranks')
    kvstore = chainermn.kvstore.create('dist_async', comm)

    images, labels = datasets.load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    order = np.random.RandomState(0).permutation(len(labels))
    mine, validation = order[:1437][comm.rank::comm.size], order[1437:]
    model = L.Classifier(chainer.Sequential(
        L.Linear(64, 100), F.relu, L.Linear(100, 100), F.relu, L.Linear(100, 10)))
    optimizer = chainermn.kvstore.create_kvstore_optimizer(
        chainer.optimizers.Adam().setup(model), kvstore)
    random = np.random.RandomState(comm.rank)

    def steps_per_second(seconds: float, sleep: float) -> float:
        comm.barrier()
        steps, start = 0, time.perf_counter()
        while (end := time.perf_counter()) < start + seconds:
            some = random.choice(mine, 16)
            optimizer.update(model, images[some], labels[some])
            if comm.rank == comm.size - 1:
                time.sleep(sleep)
            steps += 1
        return comm.allgather_obj(steps / (end - start))

    steps_per_second(args.seconds / 3, 0)  # the first steps take longer
    ratios = []
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    for i in range(args.rounds):
        rates = {}
        for is_slow in (True, False) if i % 2 else (False, True):
            *others, last = steps_per_second(args.seconds, args.sleep / 1e3 * is_slow)
            rates[is_slow] = statistics.mean(others)
            found[is_slow].append([rates[is_slow], last])
            if comm.rank == 0:
                print(f'last rank {"slow" if is_slow else "    "} {last:7.1f} steps/s, '
                      f'others {rates[is_slow]:7.1f}', flush=True)
        ratios.append(rates[True] / rates[False])

    paths, parameters = zip(*model.namedparams(), strict=True)
    kvstore.barrier()
    kvstore.pull(paths, [parameter.array for parameter in parameters])
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        accuracy = float(F.accuracy(model.predictor(images[validation]), labels[validation]).array)
    if comm.rank == 0:
        if args.svg:
            _rounds.chart(args.svg, f'dist_async with a slow rank, {comm.size} ranks',
                          'steps per second, relative to no slow rank',
                          {_rounds.V8: {'other ranks': ratios}})
        ratio = statistics.median(ratios)
        _rounds.table(['run', 'other ranks, steps/s', 'last rank, steps/s'], (
            [name, *map(statistics.median, zip(*found[is_slow], strict=True))]
            for is_slow, name in [(False, 'no slow rank'), (True, 'the last rank is slow')]))
        print('ratios', *(f'{one:.3f}' for one in ratios))
        print(f'others, with a slow rank against without: {ratio:.3f} (at least 0.9: '
              f'{"yes" if ratio >= .9 else "NO"})')
        print(f'accuracy {accuracy:.2%} (at least 95%: {"yes" if accuracy >= .95 else "NO"})')


if __name__ == '__main__':
    main()
