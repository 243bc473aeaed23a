"""Random sequences of operations, right and wrong, compared with NumPy in one process.

Rank 0 draws, all ranks play: each outcome must be the correct value or the same error on all ranks,
and nothing may hang::

    mpiexec -n 3 python tests/reliability/fuzz_operations.py --sequences 2000 --seed 1

Rank 0 shrinks and prints a failure.  A sequence that takes longer than ``--limit``
seconds is printed with the stacks of all ranks, and the job ends.
"""
from __future__ import annotations

import argparse
import faulthandler
import pathlib
import sys
import threading
import time
from typing import Any

import fuzz_play
import hypothesis
from fuzz_calls import sequences
from mpi4py import MPI

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from time_limits import seconds

NAMES = ('naive', 'flat')


class Limit:
    """Ends the process when a sequence takes too long."""

    def __init__(self, seconds: float, steps: Any) -> None:
        self._seconds = seconds
        self._timer = threading.Timer(seconds, self._print, [steps])
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()
        faulthandler.dump_traceback_later(self._seconds + 2, exit=True, file=sys.__stderr__)

    def __exit__(self, *args: Any) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def _print(self, steps: Any) -> None:
        print(f'rank {MPI.COMM_WORLD.rank} took longer than {self._seconds} s in\n{steps!r}',
              file=sys.__stderr__, flush=True)


def fuzz(number: int, seed: int, limit: float | None = 30) -> dict[str, int]:
    """Plays sequences.  Collective: every rank calls it.

    Args:
        number: The number of sequences.
        seed: The random seed.
        limit: Seconds per sequence; ``None`` for no limit.

    Returns:
        The numbers of sequences, values and errors, on rank 0.

    Raises:
        AssertionError: On rank 0, with the smallest failing sequence.
    """
    control = MPI.COMM_WORLD.Dup()
    counts = {'sequences': 0, 'values': 0, 'errors': 0}

    def play(steps: Any) -> list[str]:
        faults = []
        for name in NAMES:
            if limit is None:
                faults += fuzz_play.play(control, name, steps, counts)
            else:
                with Limit(limit, steps):
                    faults += fuzz_play.play(control, name, steps, counts)
        counts['sequences'] += 1
        return faults

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=number, database=None, deadline=None, derandomize=False,
                         suppress_health_check=list(hypothesis.HealthCheck),
                         phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink])
    @hypothesis.given(sequences(control.size))
    def lead(steps: Any) -> None:
        control.bcast(steps)
        faults = play(steps)
        assert not faults, '\n'.join([*map(repr, steps), *faults])

    if control.rank == 0:
        try:
            lead()
        finally:
            control.bcast(None)
    else:
        while (steps := control.bcast(None)) is not None:
            play(steps)
    control.Free()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sequences', type=int, default=2000, metavar='N')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--limit', type=float, default=30, metavar='SECONDS')
    options = parser.parse_args()
    start = time.perf_counter()
    counts = fuzz(options.sequences, options.seed, seconds(options.limit))
    if MPI.COMM_WORLD.rank == 0:
        print(f'seed {options.seed} on {MPI.COMM_WORLD.size} ranks, {" and ".join(NAMES)}: '
              f'{counts["sequences"]} sequences, {counts["values"]} outcomes with the right value '
              f'and {counts["errors"]} with the same error everywhere, 0 hangs, '
              f'in {time.perf_counter() - start:.0f} s')


if __name__ == '__main__':
    main()
