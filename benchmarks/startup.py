"""What chainer_compat costs: the start of Python, and ``import chainer``, with it against without.

Run it in an environment that has ChainerMN: ``python benchmarks/startup.py [--rounds 30]``.

- Start: ``python -c pass`` with the ``.pth`` line of ChainerMN against the same folder of packages
  without it (a copy made of links).
- Import: ``import chainer``, mended against not mended, where Chainer can be imported as it is
  (NumPy 1.26, Python 3.10 and 3.11, setuptools < 82).  Everywhere, what the finder and the loader
  of chainer_compat take within the process, without the modules that they load.

Both variants take turns, so that a busy moment meets both.  Prints medians in milliseconds.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time

# Counts the time within chainer_compat: finding, reading the source, editing, compiling, patching.
WITHIN = '''
import sys, time
import importlib.util, typing  # Chainer imports them too
start = time.perf_counter()
import chainer_compat
from chainer_compat import _mend, shims
spent = time.perf_counter() - start

def timed(function):
    def wrapper(*args):
        global spent
        start = time.perf_counter()
        try:
            return function(*args)
        finally:
            spent += time.perf_counter() - start
    return wrapper

find = chainer_compat.ChainerFinder.find_spec
chainer_compat.ChainerFinder.find_spec = timed(find)
_mend.MendingLoader.get_code = timed(_mend.MendingLoader.get_code)
for shims in _mend.patches.values():
    shims[:] = map(timed, shims)
import chainer
print(spent * 1e3)
'''
IMPORT = '''
import time
start = time.perf_counter()
import chainer
print((time.perf_counter() - start) * 1e3)
'''


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in this environment's Python, with these environment variables."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(('CHAINER', 'PYTHON'))}
    command = [sys.executable, '-W', 'ignore', '-c', code]
    return subprocess.run(command, env=env | variables, capture_output=True, text=True, check=False)


def milliseconds_to_start(python: pathlib.Path) -> float:
    """Returns how long a ``python`` takes that does nothing."""
    start = time.perf_counter()
    subprocess.run([python, '-c', 'pass'], check=True)
    return (time.perf_counter() - start) * 1e3


def environment_without(folder: pathlib.Path) -> pathlib.Path:
    """Makes a twin of this environment, without ChainerMN's .pth; returns its python."""
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder], check=True)
    ours = pathlib.Path(sysconfig.get_path('purelib'))
    twin = folder / pathlib.Path(ours).relative_to(sys.prefix)
    for entry in ours.iterdir():
        if entry.name != 'chainer_compat.pth' and not (twin / entry.name).exists():
            (twin / entry.name).symlink_to(entry)
    return folder / 'bin' / 'python'


def environment_with(folder: pathlib.Path) -> pathlib.Path:
    """Makes another twin, with it, so that both are alike in all else."""
    python = environment_without(folder)
    ours = pathlib.Path(sysconfig.get_path('purelib'), 'chainer_compat.pth')
    (folder / ours.parent.relative_to(sys.prefix) / ours.name).symlink_to(ours)
    return python


def compare(name: str, limit: float, with_it: list[float], without: list[float]) -> None:
    """Prints the medians, and that of the differences within a round."""
    differences = [a - b for a, b in zip(with_it, without, strict=True)]
    a, b = statistics.median(with_it), statistics.median(without)
    difference = statistics.median(differences)
    print(f'{name:<16} with {a:8.2f}  without {b:8.2f}  ratio {a / b:5.3f}  '
          f'difference {difference:+6.2f} ms (at most {limit:g}: '
          f'{"yes" if difference < limit else "NO"})')


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=30, help='default: %(default)s')
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        pythons = [environment_with(pathlib.Path(folder, 'with')),
                   environment_without(pathlib.Path(folder, 'without'))]
        for python in pythons:
            milliseconds_to_start(python)  # writes .pyc files, fills the cache of files
        starts: list[list[float]] = [[], []]
        for i in range(4 * rounds):
            for which in (0, 1) if i % 2 else (1, 0):
                starts[which].append(milliseconds_to_start(pythons[which]))
        compare('start of Python', 1, *starts)

    if run(IMPORT, CHAINER_COMPAT='0').returncode == 0:
        imports: list[list[float]] = [[], []]
        for i in range(rounds):
            for which in (0, 1) if i % 2 else (1, 0):
                imports[which].append(float(run(IMPORT, CHAINER_COMPAT='10'[which]).stdout))
        compare('import chainer', 30, *imports)
    else:
        print('import chainer   without chainer_compat fails here')
    pairs = [(float(run(WITHIN).stdout), float(run(IMPORT).stdout)) for _ in range(rounds)]
    within, whole = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f'import chainer   {within:.2f} of {whole:.2f} ms are spent within chainer_compat '
          f'(at most 30: {"yes" if within < 30 else "NO"})')


if __name__ == '__main__':
    main()
