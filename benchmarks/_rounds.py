"""Groups of processes that take turns, so that a busy moment meets all methods alike.

The processes of all groups are there all the time; those that have no turn sleep.  What counts is
the ratio of two methods within a round, and of these the median.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any


def parser(doc: str, rounds: int, ranks: int) -> argparse.ArgumentParser:
    """Makes a parser with the options that every such benchmark has."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument('--ranks', type=int, default=ranks, help='default: %(default)s')
    made.add_argument('--rounds', type=int, default=rounds, help='default: %(default)s')
    made.add_argument('--png', metavar='FILE', help='draw the ratios of all rounds (matplotlib)')
    made.add_argument('--work', help=argparse.SUPPRESS)
    made.add_argument('--folder', help=argparse.SUPPRESS)
    return made


class Group:
    """The processes of one kind: ``ours``, or ``old`` with the chainermn that Chainer carries."""

    def __init__(self, script: str, kind: str, ranks: int, folder: str) -> None:
        for name in ('answers', *range(ranks)):
            os.mkfifo(f'{folder}/{kind}.{name}')
        env = {key: value for key, value in os.environ.items() if key != 'PYTHONPATH'}
        env |= {'OMP_NUM_THREADS': '1', 'CHAINERMN_OVERLAY': '0' if kind == 'old' else '1'}
        beside = pathlib.Path(sys.executable).with_name('mpiexec')
        self._process = subprocess.Popen(
            [str(beside) if beside.exists() else 'mpiexec', '-n', str(ranks), sys.executable,
             '-W', 'ignore', pathlib.Path(script).resolve(), '--work', kind, '--folder', folder],
            env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self._commands = [self._open(f'{folder}/{kind}.{rank}') for rank in range(ranks)]
        self._answers = open(f'{folder}/{kind}.answers')  # noqa: SIM115

    def _open(self, path: str) -> int:
        """Opens a pipe to write to, once the process is at the other end."""
        while True:
            try:
                return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                if self._process.poll() is not None:
                    raise RuntimeError('a process ended while it started') from None
                time.sleep(.05)

    def ask(self, command: Any) -> Any:
        """Lets all processes take a turn; returns what rank 0 answers."""
        for pipe in self._commands:
            os.write(pipe, f'{json.dumps(command)}\n'.encode())
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError(f'the processes ended with {self._process.wait()}')
        return json.loads(answer)

    def end(self) -> None:
        """Ends the processes."""
        for pipe in self._commands:
            os.close(pipe)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()


@contextlib.contextmanager
def groups(script: str, ranks: int) -> Iterator[dict[str, Group]]:
    """Starts a group of ours and one of the old chainermn, running ``script --work KIND``."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        started = {}
        for kind in ('ours', 'old'):
            started[kind] = Group(script, kind, ranks, folder)
            stack.callback(started[kind].end)
        yield started


def answer(kind: str, folder: str, rank: int, do: Callable[[Any], Any]) -> None:
    """In a process of a group: does what it is asked, and answers on rank 0."""
    with open(f'{folder}/{kind}.{rank}') as commands, contextlib.ExitStack() as stack:
        file = stack.enter_context(open(f'{folder}/{kind}.answers', 'w')) if rank == 0 else None
        for command in commands:
            result = do(json.loads(command))
            if file:
                print(json.dumps(result), file=file, flush=True)


def ratios(a: list[float], b: list[float]) -> list[float]:
    """The ratio of each round."""
    return [x / y for x, y in zip(a, b, strict=True)]


def show(what: str, a: list[float], b: list[float], goal: float) -> str:
    """One line about ours (a) against the old one (b), in seconds."""
    each = ratios(a, b)
    return (f'{what:<28} {statistics.median(a) * 1e3:10.3f} ms, old '
            f'{statistics.median(b) * 1e3:10.3f} ms: {statistics.median(each):.3f} '
            f'({min(each):.3f} to {max(each):.3f}) times; goal {goal:g}')


def load() -> str:
    """How busy the machine is."""
    return (f'load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores')


def draw(path: str, title: str, each: dict[str, list[float]], goal: float) -> None:
    """Draws the ratios of all rounds, a point for each."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 1.2 + .5 * len(each)), layout='constrained')
    for row, values in enumerate(each.values()):
        axes.plot(values, [row] * len(values), 'o', alpha=.4)
        axes.plot(statistics.median(values), row, 'k|', markersize=24)
    axes.axvline(goal, linestyle='--', color='gray', label=f'goal {goal:g}')
    axes.axvline(1, color='gray', label='old chainermn')
    axes.set(title=title, xlabel='times the old one', yticks=range(len(each)),
             yticklabels=list(each), xlim=(0, None), ylim=(-.6, len(each) - .4))
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=150)
