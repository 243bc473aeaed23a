"""Startup times: Python, ``import chainer``, ``import chainermn``, and a communicator.

Run it in an environment with ChainerMN: ``python benchmarks/startup.py [--rounds 40]``.

- start: ``python -c pass`` in this environment, with and without the ``.pth`` file of ChainerMN.
- import: ``import chainer``, patched at import time, compared with a copy of Chainer whose files
  contain the same edits.
- chainermn: ``import chainer, chainermn``, compared with ``import chainer``.
- communicator: the first ``create_communicator`` on 4 ranks, including imports, on the slowest
  rank, in new processes that have already initialized MPI.

The output shows the median of the differences within a round, in milliseconds of wall-clock time
and of CPU time (user and system). The variants take turns in random order, so that load affects
both equally. On a busy machine, CPU time is more stable.
"""

import argparse
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time

import _rounds
import chainer

from chainer_compat import shims  # noqa: F401  (fills the registry)
from chainer_compat.patching import registry

PTH = 'chainer_compat.pth'
START = 'Python itself'
GOALS = (1, 30, 100, 50)  # milliseconds for each row


class Variant:
    """A command, and the times that it took in each round."""

    def __init__(self, python: str | pathlib.Path, code: str, **variables: str) -> None:
        self.command = [str(python), '-W', 'ignore', '-c', code]
        drop = ('CHAINER', 'PYTHON')
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
        self.env |= {'OMP_NUM_THREADS': '1'} | variables
        self.run()  # writes .pyc files, and fills the cache of files
        self.clock: list[float] = []
        self.processor: list[float] = []

    def run(self) -> tuple[float, float]:
        """Run the command; return its wall-clock time and CPU time in milliseconds."""
        start = time.perf_counter()
        pid = os.posix_spawn(self.command[0], self.command, self.env)
        _, status, usage = os.wait4(pid, 0)
        assert status == 0, self.command
        return (time.perf_counter() - start) * 1e3, (usage.ru_utime + usage.ru_stime) * 1e3

    def measure(self) -> None:
        """Run the command once more and store the times."""
        clock, processor = self.run()
        self.clock.append(clock)
        self.processor.append(processor)


def linked_environment(folder: pathlib.Path, leave_out: str = '') -> pathlib.Path:
    """Make a copy of this environment that consists of links; return its Python."""
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder], check=True)
    ours = pathlib.Path(sysconfig.get_path('purelib'))
    for entry in ours.iterdir():
        if entry.name not in (leave_out, '__pycache__'):
            (folder / ours.relative_to(sys.prefix) / entry.name).symlink_to(entry)
    return folder / 'bin' / 'python'


def copy_of_chainer(folder: pathlib.Path, edited: bool) -> str:
    """Copy Chainer into ``folder``; with ``edited``, apply the edits of the shims to the files."""
    shutil.copytree(pathlib.Path(chainer.__file__).parent, folder / 'chainer',
                    ignore=shutil.ignore_patterns('__pycache__'))
    for module, edits in registry.edits.items() if edited else ():
        file = folder.joinpath(*module.split('.')).with_suffix('.py')
        text = file.read_text(encoding='utf-8')
        for edit in edits:
            for old, new in edit().items():
                text = text.replace(old, new)
        file.write_text(text, encoding='utf-8')
    return str(folder)


def compare(rounds: int, variant: Variant, without: Variant) -> tuple[list[float], list[float]]:
    """Measure both in turns; return the differences in wall-clock and CPU time."""
    for _ in range(rounds):
        for one in random.sample([variant, without], 2):
            one.measure()
    return ([x - y for x, y in zip(variant.clock, without.clock, strict=True)],
            [x - y for x, y in zip(variant.processor, without.processor, strict=True)])


def create(rounds: int) -> list[float]:
    """Return the milliseconds to create a communicator on 4 ranks, for each round."""
    code = ('import time; from mpi4py import MPI; import chainermn; world = MPI.COMM_WORLD\n'
            'world.Barrier(); start = time.perf_counter()\n'
            "chainermn.create_communicator('flat')\n"
            'seconds = world.allreduce(time.perf_counter() - start, MPI.MAX)\n'
            'if world.rank == 0: print(seconds)')
    mpiexec = pathlib.Path(sys.executable).with_name('mpiexec')
    env = {k: v for k, v in os.environ.items() if not k.startswith('PYTHON')}
    found = []
    for _ in range(1 + rounds):
        done = subprocess.run(
            [str(mpiexec) if mpiexec.exists() else 'mpiexec', '-n', '4', sys.executable, '-W',
             'ignore', '-c', code], env=env | {'OMP_NUM_THREADS': '1'}, check=True,
            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        found.append(float(done.stdout) * 1e3)
    return found[1:]  # the first writes .pyc files


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=25, help='default: %(default)s')
    parser.add_argument('--quick', action='store_true', help='one short round, as a test')
    parser.add_argument('--svg', metavar='FILE', help='plot all rounds (matplotlib)')
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    found: dict[str, tuple[list[float], list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        found[START] = compare(
            5 * rounds, Variant(linked_environment(folder / 'with'), 'pass'),
            Variant(linked_environment(folder / 'without', leave_out=PTH), 'pass'))
        code = 'import chainer'
        found['import chainer, patched'] = compare(
            rounds,
            Variant(sys.executable, code, PYTHONPATH=copy_of_chainer(folder / 'patched', False)),
            Variant(sys.executable, code, PYTHONPATH=copy_of_chainer(folder / 'edited', True),
                    CHAINER_COMPAT='0'))
        found['import chainermn'] = compare(
            rounds, Variant(sys.executable, 'import chainer, chainermn'),
            Variant(sys.executable, code))
    found['create_communicator, 4 ranks'] = create(min(rounds, 15)), []
    _rounds.table(['step', 'added wall-clock time, ms', 'added CPU time, ms'], (
        [step, statistics.median(clock), statistics.median(cpu) if cpu else None]
        for step, (clock, cpu) in found.items()))
    for (step, (clock, _)), goal in zip(found.items(), GOALS, strict=True):
        print(f'{step}: {statistics.median(clock):.2f} ms; goal {goal}')
    print(_rounds.load())
    if args.svg:
        _rounds.chart(args.svg, 'Time to start', 'added wall-clock time, ms', {
            _rounds.V8: {step: clock for step, (clock, _) in found.items()}})


if __name__ == '__main__':
    main()
