"""Memory and time of Adam with sharded optimizer states, compared with complete ones.

Run it in an environment with ChainerMN and MPI:
``python benchmarks/sharded_states.py [--ranks 4] [--rounds 5] [--svg FILE]``.

The model has ten linear layers with 100 million float32 parameters. "State memory" is the size of
Adam's moments on the rank with the most bytes. A step consists of the update and, with sharded
states, an all-gather of the parameters with ``flat`` on one host. It does not average gradients,
which takes the same time in both cases. Steps of both kinds take turns; ratios are within a round.
"""

import statistics
import time

import _rounds

WIDTH = 3162  # ten layers of this width have 100 million parameters
GOALS = {'state memory': .27, 'step': .5}


def work(kind: str, folder: str) -> None:
    """In the processes of a group: time a step with complete and one with sharded states."""
    import chainer
    import chainer.links as L
    import numpy as np
    from mpi4py import MPI

    import chainermn

    world = MPI.COMM_WORLD
    comm = chainermn.create_communicator('flat')
    steps: dict[bool, chainer.Optimizer] = {}

    def optimizer_of(shard: bool, width: int):
        model = chainer.Sequential(*[L.Linear(width, width) for _ in range(10)])
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.Adam(), comm, shard_states=shard).setup(model)
        for param in model.params():
            param.grad = np.full(param.shape, .1, 'f')
        for _ in range(2):  # the first one broadcasts the parameters
            optimizer.update()
        return optimizer

    def turn(width: int) -> dict[str, list[float]]:
        seconds, state = [], []
        for shard in False, True:
            if shard not in steps:
                steps[shard] = optimizer_of(shard, width)
            optimizer = steps[shard]
            world.Barrier()
            start = time.perf_counter()
            optimizer._stepper.update(optimizer.actual_optimizer)
            seconds.append(world.allreduce(time.perf_counter() - start, MPI.MAX))
            state.append(world.allreduce(sum(
                value.nbytes for param in optimizer.target.params()
                for value in param.update_rule.state.values()), MPI.MAX))
        return {'seconds': seconds, 'bytes': state}

    _rounds.answer(kind, folder, world.rank, turn)


def main() -> None:
    """Run the benchmark and print the results."""
    parser = _rounds.parser(__doc__, rounds=5, ranks=4)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    if args.quick:
        args.rounds = 1
    with _rounds.groups(__file__, args.ranks, [_rounds.V8]) as groups:
        turns = [groups[_rounds.V8].ask(64 if args.quick else WIDTH) for _ in range(args.rounds)]
    found, rows = {}, []
    for row, key, unit in ('state memory', 'bytes', 1e-6), ('step', 'seconds', 1e3):
        values = found[row] = [turn[key][1] / turn[key][0] for turn in turns]
        complete, sharded = (statistics.median(turn[key][i] for turn in turns) * unit
                             for i in (0, 1))
        rows.append([f'{row}, {"MB" if key == "bytes" else "ms"}', args.ranks, complete, sharded,
                     statistics.median(values)])
        print(f'{row}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}) '
              f'times; goal {GOALS[row]:g}; {_rounds.load()}', flush=True)
    _rounds.table(['per rank', 'ranks', 'complete states', 'sharded states', 'ratio'], rows)
    if args.svg:
        _rounds.chart(args.svg, 'Sharded optimizer states', 'sharded states / complete states',
                      {_rounds.V8: found})


if __name__ == '__main__':
    main()
