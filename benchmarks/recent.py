"""Overhead of the flight recorder, which keeps the last 64 operations: one-float allreduce.

Run it in an environment with ChainerMN and MPI:
``python benchmarks/recent.py [--ranks 2] [--rounds 200] [--svg FILE]``.

The same processes alternate between running with and without the recorder. Without it, the function
that records a call is empty, and the lines around it are removed. ``on, with call sites`` also
records call sites, as with a timeout or ``CHAINERMN_DEBUG=1`` in the environment. The output shows
the median of the ratios within a round.
"""

import statistics
import time
import types

import _rounds

CALLS = 1000
OFF, ON, SITES = WAYS = 'off', 'on (default)', 'on, with call sites'
GOAL = 1.02


def work(kind: str, folder: str) -> None:
    """In the processes of a group: time some calls per turn."""
    import numpy as np
    from mpi4py import MPI

    import chainermn

    comm = chainermn.create_communicator('naive')
    check = comm._context.check
    calls, x = check.record, np.ones(1, 'f')

    def gather_equal(self, signature, block, details=None):
        """As it is, without the lines that record the call."""
        blocks = self.exchange.gather_equal(self._identifier(signature), block)
        if blocks is None:
            self._compare(signature, details)
        return blocks

    recorded = type(check).gather_equal
    ways = dict(zip(WAYS, ((gather_equal, False), (recorded, False), (recorded, True)),
                    strict=True))

    def turn(command: tuple[str, int]) -> float:
        way, n = command
        function, calls._has_sites = ways[way]
        check.gather_equal = types.MethodType(function, check)
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        for _ in range(n):
            comm.allreduce(x)
        return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX) / n

    _rounds.answer(kind, folder, comm.rank, turn)


def main() -> None:
    """Run the benchmark and print the results."""
    args = _rounds.parser(__doc__, rounds=200, ranks=2).parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    with _rounds.groups(__file__, args.ranks, (_rounds.V8,)) as groups:
        for n in range(1 if args.quick else args.rounds):
            for name in WAYS[n % 3:] + WAYS[:n % 3]:
                seconds[name].append(groups[_rounds.V8].ask((name, 2 if args.quick else CALLS)))
    ratios = {name: _rounds.ratios(seconds[name], seconds[OFF]) for name in WAYS}
    _rounds.table(['flight recorder', 'allreduce of a float, µs', 'ratio to off'],
                  ([name, statistics.median(seconds[name]) * 1e6, statistics.median(ratios[name])]
                   for name in WAYS))
    print(f'{args.ranks} ranks; on over off {_rounds.times(seconds[ON], seconds[OFF])}; '
          f'goal {GOAL}; {_rounds.load()}')
    if args.svg:
        _rounds.chart(args.svg, 'Flight recorder: time of an allreduce of a float',
                      'time relative to no flight recorder',
                      {_rounds.V8: {name: ratios[name] for name in (ON, SITES)}})


if __name__ == '__main__':
    main()
