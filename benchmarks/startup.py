"""What chainer_compat costs: the start of Python, and ``import chainer``, with it against without.

Run it in an environment that has ChainerMN: ``python benchmarks/startup.py [--rounds 40]``.

- start: ``python -c pass``, in this environment with the ``.pth`` file of ChainerMN and without it.
- import: ``import chainer``, mended when it is imported, against a copy of Chainer whose files hold
  the same edits and are left alone.

Prints the median of the differences within a round, of time on the clock and of processor time
(user and system), in milliseconds.  The variants take turns, in random order, so that a busy moment
meets both; on a busy machine processor time is the steadier figure.
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

import chainer

from chainer_compat import _mend, shims  # noqa: F401  (fills the registry)

PTH = 'chainer_compat.pth'


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
        """Returns time on the clock and processor time, in milliseconds."""
        start = time.perf_counter()
        pid = os.posix_spawn(self.command[0], self.command, self.env)
        _, status, usage = os.wait4(pid, 0)
        assert status == 0, self.command
        return (time.perf_counter() - start) * 1e3, (usage.ru_utime + usage.ru_stime) * 1e3

    def measure(self) -> None:
        """Runs once more and keeps the times."""
        clock, processor = self.run()
        self.clock.append(clock)
        self.processor.append(processor)


def twin(folder: pathlib.Path, leave_out: str = '') -> pathlib.Path:
    """Makes a copy of this environment out of links; returns its python."""
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder], check=True)
    ours = pathlib.Path(sysconfig.get_path('purelib'))
    for entry in ours.iterdir():
        if entry.name not in (leave_out, '__pycache__'):
            (folder / ours.relative_to(sys.prefix) / entry.name).symlink_to(entry)
    return folder / 'bin' / 'python'


def copy_of_chainer(folder: pathlib.Path, edited: bool) -> str:
    """Copies Chainer into ``folder``, which it returns, and edits the files as the shims say."""
    shutil.copytree(pathlib.Path(chainer.__file__).parent, folder / 'chainer',
                    ignore=shutil.ignore_patterns('__pycache__'))
    for module, edits in _mend.edits.items() if edited else ():
        file = folder.joinpath(*module.split('.')).with_suffix('.py')
        text = file.read_text(encoding='utf-8')
        for edit in edits:
            for old, new in edit().items():
                text = text.replace(old, new)
        file.write_text(text, encoding='utf-8')
    return str(folder)


def compare(name: str, limit: float, rounds: int, variant: Variant, without: Variant) -> None:
    """Measures both in turns and prints how they differ."""
    for _ in range(rounds):
        for one in random.sample([variant, without], 2):
            one.measure()
    for what, a, b in [('clock', variant.clock, without.clock),
                       ('processor', variant.processor, without.processor)]:
        difference = statistics.median(x - y for x, y in zip(a, b, strict=True))
        base = statistics.median(b)
        print(f'{name:<7}{what:<10}{difference:+7.2f} ms on {base:7.2f} '
              f'({1 + difference / base:.3f} times), at most {limit:g}: '
              f'{"yes" if difference < limit else "NO"}')


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=40, help='default: %(default)s')
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        compare('start', 1, 5 * rounds,
                Variant(twin(folder / 'with'), 'pass'),
                Variant(twin(folder / 'without', leave_out=PTH), 'pass'))
        code = 'import chainer'
        compare('import', 30, rounds,
                Variant(sys.executable, code, PYTHONPATH=copy_of_chainer(folder / 'mended', False)),
                Variant(sys.executable, code, PYTHONPATH=copy_of_chainer(folder / 'edited', True),
                        CHAINER_COMPAT='0'))
    print('load', *(f'{load:.1f}' for load in os.getloadavg()), 'on', os.cpu_count(), 'processors')


if __name__ == '__main__':
    main()
