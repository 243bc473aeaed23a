"""Overhead of recording a run: training steps with and without CHAINERMN_RECORD.

Run it in an environment with ChainerMN and MPI:
``python benchmarks/run_record.py [--ranks 1] [--rounds 7] [--svg FILE]``.

The same processes alternate between running with and without a record, 100 steps at a time, so that
each turn with a record contains one step with digests of all parameters and functions. For
ResNet-50, a turn has only one step, without digests; their cost is measured separately. The output
shows the median of the ratios within a round.
"""

import pathlib
import statistics
import time

import _rounds

GOALS = {'perceptron, 1,000 units': 1.03, 'ResNet-50': 1.01}
#: Number of steps in a turn.
STEPS = {'perceptron, 1,000 units': 100, 'perceptron, 100 units': 100, 'ResNet-50': 1}
DETAILED, EVERY = 'ResNet-50, details', 100


def work(kind: str, folder: str) -> None:
    """In the processes of a group: time some steps per turn."""
    import _steps_of_chainer as steps
    import chainer
    import chainer.functions as F
    import chainer.links as L
    from mpi4py import MPI

    import chainermn
    from chainermn._records import run_record

    comm = chainermn.create_communicator('flat')
    optimizers, recordings, trained = {}, {}, {}

    def wrap(name):
        def make(optimizer):
            made = optimizers[name] = chainermn.create_multi_node_optimizer(optimizer, comm)
            recordings[name] = run_record.Recording(
                str(pathlib.Path(folder, name)), EVERY, number=lambda: numbers[name])
            return made
        return make

    def small(wrap):
        layers = L.Linear(64, 100), F.relu, L.Linear(100, 100), F.relu, L.Linear(100, 10)
        return steps._classifying(
            chainer.Sequential(*layers), wrap(chainer.optimizers.SGD()), (16, 64), 10)

    numbers = dict.fromkeys(STEPS, 1)
    makers = dict(zip(STEPS, (steps.perceptron, small, steps.resnet50), strict=True))
    for name, maker in makers.items():
        trained[name] = maker(wrap(name))
        trained[name]()
        trained[name]()

    def turn(command: tuple[str, bool]) -> float:
        name, on = command
        model = 'ResNet-50' if name == DETAILED else name
        optimizers[model]._recording = recordings[model] if on else None
        n = 1 if name == DETAILED else STEPS[name]
        # The first of 100 steps has digests. A turn of ResNet-50 only contains the second step.
        numbers[model] = 2 if name == 'ResNet-50' else 1
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        for _ in range(n):
            trained[model]()
            numbers[model] += 1
        return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX) / n

    _rounds.answer(kind, folder, comm.rank, turn)


def main() -> None:
    """Run the benchmark and print the results."""
    args = _rounds.parser(__doc__, rounds=7, ranks=1).parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    names = [*STEPS, DETAILED]
    seconds: dict[bool, dict[str, list[float]]] = {on: {name: [] for name in names}
                                                   for on in (False, True)}
    with _rounds.groups(__file__, args.ranks, (_rounds.V8,)) as groups:
        ask = groups[_rounds.V8].ask
        for n in range(1 if args.quick else args.rounds):
            for name in names:
                for on in (n % 2 == 0, n % 2 == 1):
                    seconds[on][name].append(ask((name, on)))
    ratios = {name: _rounds.ratios(seconds[True][name], seconds[False][name]) for name in names}
    more = statistics.median(ratios.pop(DETAILED)) - 1
    ratios['ResNet-50'] = [ratio + more / EVERY for ratio in ratios['ResNet-50']]
    _rounds.table(['training step', 'without a record, ms', 'with a record, ms', 'ratio'],
                  ([name, base := statistics.median(seconds[False][name]) * 1e3,
                    base * (ratio := statistics.median(each)), ratio]
                   for name, each in ratios.items()))
    print(f'{args.ranks} ranks; {_rounds.load()}')
    print(f'a step of ResNet-50 with digests of everything: {1 + more:.3f} times')
    for name, goal in GOALS.items():
        print(f'{name}: {statistics.median(ratios[name]):.3f} times; goal {goal}')
    if args.svg:
        _rounds.chart(args.svg, 'Recording a run', 'time relative to no record',
                      {_rounds.V8: ratios})


if __name__ == '__main__':
    main()
