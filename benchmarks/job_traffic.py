"""Messages and bytes for starting, checking and diagnosing a job, counted and predicted.

Run it in an environment with ChainerMN and MPI:
``python benchmarks/job_traffic.py [--ranks 2,8,32] [--svg FILE]``.

Calls of mpi4py are counted on real ranks. The output shows the messages and bytes that arrive at
the rank that receives the most. A collective of MPI counts as one message from each other rank. The
events:

- create: the first ``create_communicator``, without the messages of watchdogs;
- check: the consistency check of a barrier, without the messages of watchdogs;
- deadlock: one rank waits for a message of another rank, and all others are in a barrier. Counted
  are the states that ranks send to the first rank, the rounds of confirmation, and the responses;
- stall warning: one rank computes, and all others are in a barrier. Counted are the questions and
  answers;
- timeout: the same, with the responses and alarms at a rank that may report.

The model of messages and bytes is a + b * ranks, or a + b * log2(ranks) for the check. It is fitted
to the two largest numbers of ranks.
"""

import argparse
import collections
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time

import _rounds

RANKS = (2, 8, 32)
PREDICTED = (256, 1024, 4096)
#: The events of each job, the environment, and whether the job ends with status 0.
JOBS = {
    'deadlock': (('create', 'check', 'deadlock'), {}, False),
    'stall warning': (('stall warning',), {'CHAINERMN_STALL_WARNING': '4'}, True),
    'timeout': (('timeout',), {'CHAINERMN_TIMEOUT': '12'}, False),
}
EVENTS = tuple(event for events, _, _ in JOBS.values() for event in events)


def work(job: str, folder: str) -> None:
    """On each rank: record the messages that arrive here, and the messages sent to other ranks."""
    from mpi4py import MPI

    import chainermn

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    path = pathlib.Path(folder, str(rank))
    file = path.open('w', buffering=1)

    def received(at: int, messages: int, n_bytes: int, is_of_watchdog: bool = False) -> None:
        print(json.dumps([at, messages, n_bytes, is_of_watchdog]), file=file)

    class Counted(MPI.Intracomm):
        """Counts its own calls and the calls of its duplicates."""

        def allgather(self, value):
            values = super().allgather(value)
            received(rank, len(values) - 1, len(pickle.dumps(values)))
            return values

        def bcast(self, value, root=0):
            value = super().bcast(value, root)
            received(rank, 1, len(pickle.dumps(value)))
            return value

        def Allgather(self, send, buffer):  # noqa: N802
            super().Allgather(send, buffer)
            received(rank, self.size - 1, memoryview(buffer).nbytes)

        def Send(self, data, dest, tag):  # noqa: N802
            received(dest, 1, len(data))
            super().Send(data, dest, tag)

        def Issend(self, data, dest, tag):  # noqa: N802
            received(dest, 1, len(data), is_of_watchdog=True)
            return super().Issend(data, dest, tag)

    def event(name: str) -> None:
        print(json.dumps(name), file=file)

    event('create' if job == 'deadlock' else 'other')
    comm = chainermn.create_communicator('naive', Counted(MPI.COMM_WORLD))
    event('other')
    MPI.COMM_WORLD.Barrier()
    event('check' if job == 'deadlock' else 'other')
    comm.barrier()
    event('other')
    MPI.COMM_WORLD.Barrier()
    event(job)
    if rank == size - 1 and job == 'deadlock':
        comm.recv(0, 5)
    if rank == size - 1:
        time.sleep(10 if job == 'stall warning' else 100)
        event('other')
    comm.barrier()
    event('other')


def count(job: str, ranks: int) -> dict[str, tuple[int, int]]:
    """Return messages and bytes at the busiest rank, by event."""
    _, env, is_successful = JOBS[job]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            _rounds.local(ranks)([sys.executable, '-W', 'ignore', __file__,
                                  '--work', job, '--folder', folder]),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | env)
        if (done.returncode == 0) != is_successful:
            raise SystemExit(done.stdout)
        messages: collections.Counter[tuple[str, int]] = collections.Counter()
        n_bytes: collections.Counter[tuple[str, int]] = collections.Counter()
        for path in pathlib.Path(folder).iterdir():
            event = ''
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                if isinstance(entry, str):
                    event = entry
                    continue
                at, n, size, is_of_watchdog = entry
                if is_of_watchdog == (event not in ('create', 'check')):
                    messages[event, at] += n
                    n_bytes[event, at] += size
    return {event: max((n_bytes[event, at], messages[event, at]) for at in range(ranks))[::-1]
            for event in JOBS[job][0]}


def fit(event: str, counts: dict[int, float], ranks: int) -> float:
    """Return the prediction of the model for a number of ranks."""
    def x(ranks: int) -> float:
        return (ranks - 1).bit_length() if event == 'check' else ranks

    (one, first), (two, second) = [*counts.items()][-2:]
    slope = (second - first) / (x(two) - x(one))
    return second + slope * (x(ranks) - x(two))


def main() -> None:
    """Count messages and bytes, and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--ranks', default=','.join(map(str, RANKS)), help='default: %(default)s')
    parser.add_argument('--quick', action='store_true', help='only 2 and 3 ranks, as a test')
    parser.add_argument('--svg', metavar='FILE', help='plot the bytes of each event (matplotlib)')
    parser.add_argument('--work', help=argparse.SUPPRESS)
    parser.add_argument('--folder', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    sizes = [2, 3] if args.quick else [int(n) for n in args.ranks.split(',')]
    counts = {n: {event: each for job in JOBS for event, each in count(job, n).items()}
              for n in sizes}
    worst = 1.
    for is_bytes, unit in enumerate(('messages', 'bytes')):
        rows, curves = [], {}
        for event in EVENTS:
            found = {n: counts[n][event][is_bytes] for n in sizes}
            values = [*found.values(), *(round(fit(event, found, n)) for n in PREDICTED)]
            rows.append([event, *values])
            curves[event] = dict(zip((*sizes, *PREDICTED), values, strict=True))
            if is_bytes and len(sizes) > 2:
                model = fit(event, {n: found[n] for n in sizes[:-1]}, sizes[-1])
                worst = max(worst, found[sizes[-1]] / model, model / found[sizes[-1]])
        _rounds.table([unit, *(f'{n:,}' for n in (*sizes, *PREDICTED))], rows,
                      f'{unit.capitalize()} at the rank that receives the most, by number of ranks '
                      f'(predicted from {PREDICTED[0]:,} ranks on)')
    print(f'bytes at {sizes[-1]} ranks over the model fitted to fewer ranks, or the inverse: at '
          f'most {worst:.2f} times; {_rounds.load()}')
    if args.svg:
        draw(args.svg, curves, sizes[-1])


def draw(path: str, curves: dict[str, dict[int, int]], largest: int) -> None:
    """Draw the bytes of each event over the number of ranks."""
    figure, (axes,) = _rounds.axes_of(4.5)
    for event, points in curves.items():
        color, marker, line = _rounds.STYLES[event]
        axes.plot(points.keys(), points.values(), line, color=color, marker=marker, label=event)
    axes.axvspan(largest, max(points), color='#eeeeee', label='predicted')
    figure.suptitle('Start, check and diagnosis of a job')
    axes.set(xscale='log', yscale='log',
             xlabel='ranks', ylabel='bytes that a rank receives')
    axes.set_xticks([*points], [f'{n:,}' for n in points])
    axes.minorticks_off()
    axes.grid(alpha=.3)
    _rounds.add_legend(figure, axes)
    _rounds.save(figure, path)


if __name__ == '__main__':
    main()
