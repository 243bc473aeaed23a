"""Overhead of recording a timeline: a training step, and the worst case, a one-float allreduce.

Run it in an environment with ChainerMN and MPI:
``python benchmarks/timeline.py [--ranks 2] [--rounds 25] [--svg FILE]``.

The same processes alternate between running with and without a timeline. Without it, the operations
are the same as when ``CHAINERMN_TIMELINE`` is not set. A step is an update of a multilayer
perceptron: with 1,000 units and batches of 100 images of 28 x 28 pixels, or with 100 units and 16
images of 8 x 8. The output shows the median of the ratios within a round. Without the variable,
four empty with-statements per update remain. They are measured separately, because they are too
short to be visible in a step.
"""

import statistics
import time

import _rounds

GOAL = 1.03
STEP = 'step of a perceptron, 1,000 units'
#: Number of units, of pixels, of examples in a batch, and of steps in a turn.
STEPS = {STEP: (1000, 784, 100, 20), 'step of a perceptron, 100 units': (100, 64, 16, 200)}
CALL, CALLS = 'allreduce of a float', 1000
SPANS = 'forward', 'backward', 'exchange', 'update'


def work(kind: str, folder: str) -> None:
    """In the processes of a group: time some steps or calls per turn."""
    import chainer
    import numpy as np
    from chainer import functions as F
    from chainer import links as L
    from mpi4py import MPI

    import chainermn
    from chainermn._consistency.signature_exchange import SignatureExchange
    from chainermn._operations import call_signature
    from chainermn._timeline import recorder

    comm = chainermn.create_communicator('flat')
    check = comm._context.check
    tracer, timeline = comm._tracer, recorder.get()
    exchanges = {True: check.exchange, False: SignatureExchange(
        check.mpi_comm, call_signature.SIZE, check._share, check._spins)}

    def switch(on: bool) -> None:
        comm._tracer = tracer if on else None
        check.exchange = exchanges[on]
        recorder.runtime.get(recorder._Recorder).timeline = timeline if on else None

    one = np.ones(1, 'f')
    trained = {}
    for name, (units, pixels, examples, _) in STEPS.items():
        model = L.Classifier(chainer.Sequential(
            L.Linear(pixels, units), F.relu, L.Linear(units, units), F.relu, L.Linear(units, 10)))
        optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
        batch = np.random.rand(examples, pixels).astype('f'), np.zeros(examples, 'i')
        trained[name] = optimizer.setup(model), (model, *batch)
        trained[name][0].update(*trained[name][1])

    def spans(n: int) -> None:
        for _ in range(n):
            for name in SPANS:
                with comm.span(name):
                    pass

    def steps(n: int, name: str) -> None:
        optimizer, args = trained[name]
        for _ in range(n):
            optimizer.update(*args)

    def calls(n: int) -> None:
        for _ in range(n):
            comm.allreduce(one)

    def turn(command: tuple[str, int, bool]) -> float:
        name, n, on = command
        switch(on)
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        if name in STEPS:
            steps(n, name)
        else:
            {'spans': spans, CALL: calls}[name](n)
        return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX) / n

    _rounds.answer(kind, folder, comm.rank, turn)


def main() -> None:
    """Run the benchmark and print the results."""
    args = _rounds.parser(__doc__, rounds=25, ranks=2).parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    turns = {name: steps for name, (*_, steps) in STEPS.items()} | {CALL: CALLS}
    seconds: dict[bool, dict[str, list[float]]] = {on: {name: [] for name in turns}
                                                   for on in (False, True)}
    empty = []
    with _rounds.groups(__file__, args.ranks, (_rounds.TIMED,)) as groups:
        ask = groups[_rounds.TIMED].ask
        for n in range(1 if args.quick else args.rounds):
            for name, count in turns.items():
                for on in (n % 2 == 0, n % 2 == 1):
                    seconds[on][name].append(ask((name, 2 if args.quick else count, on)))
            empty.append(ask(('spans', CALLS, False)))
    ratios = {name: _rounds.ratios(seconds[True][name], seconds[False][name]) for name in turns}
    units = {name: ('µs', 1e6) if name == CALL else ('ms', 1e3) for name in turns}
    _rounds.table(['operation', 'without a timeline', 'with a timeline', 'ratio'],
                  ([f'{name}, {unit}',
                    *(statistics.median(seconds[on][name]) * factor for on in (False, True)),
                    statistics.median(ratios[name])] for name, (unit, factor) in units.items()))
    off, step = statistics.median(empty), statistics.median(seconds[False][STEP])
    print(f'without one, the with-statements of a step take {off * 1e6:.2f} µs: '
          f'{1 + off / step:.6f} times')
    print(f'{args.ranks} ranks; {STEP}: {_rounds.times(seconds[True][STEP], seconds[False][STEP])}'
          f'; goal {GOAL}; {_rounds.load()}')
    if args.svg:
        _rounds.chart(args.svg, 'Recording a timeline', 'time relative to no timeline',
                      {_rounds.V8: ratios})


if __name__ == '__main__':
    main()
