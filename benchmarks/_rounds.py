"""Groups of processes that take turns, so that load on the machine affects all methods equally.

The processes of all groups run for the whole time. While one group takes its turn, the processes of
the other groups sleep. Results are the ratios of two methods within each round, and the median of
these ratios.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'pictures'))
import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Launcher = Callable[[list[str]], list[str]]

#: The methods that are compared. Texts, tables, legends and pages use these names.
V8, V7, TORCH, DDP, MPI4PY = 'ChainerMN 8', 'ChainerMN 7', 'PyTorch', 'PyTorch DDP', 'mpi4py'
WITHOUT_TORCH, BFLOAT16 = f'{V8} without PyTorch', f'{V8}, bfloat16'
FUSED, COMPILED = f'{TORCH}, fused', f'{TORCH}, compiled'
AUTOCAST, AUTOCAST_FUSED = f'{TORCH}, autocast', f'{TORCH}, autocast and fused'
TIMED, STALL = f'{V8}, timed', f'{V8}, stall'
MOSAIC, WEBDATASET = 'MosaicML Streaming', 'WebDataset'

#: Kinds of processes, and the environment variables in which they differ.
KINDS = {
    V8: {},
    TIMED: {'CHAINERMN_TIMELINE': 'timeline.json'},
    STALL: {},
    V7: {'CHAINERMN_OVERLAY': '0'},  # the chainermn that is part of Chainer
    WITHOUT_TORCH: {'CHAINER_USE_TORCH': 'never'},
    BFLOAT16: {'CHAINER_TORCH_COMPUTE_DTYPE': 'bfloat16'},
    **{kind: {} for kind in (TORCH, DDP, FUSED, COMPILED, AUTOCAST, AUTOCAST_FUSED, MOSAIC,
                             WEBDATASET)},
}
#: Color, marker and line style of each name in all plots, in the order of series and columns. Most
#: colors are from the palette of Okabe and Ito, which color-blind people can tell apart.
STYLES = {
    V8: ('#0072B2', 'o', '-'),
    f'{V8}, naive': ('#56B4E9', 'D', '-'),
    f'{V8}, fp16': ('#56B4E9', 'D', '--'),
    f'{V8}, 2bit': ('#004D80', 'X', ':'),
    WITHOUT_TORCH: ('#E69F00', 'P', '-'),
    V7: ('#D55E00', 's', '-'),
    TORCH: ('#009E73', '^', '-'),
    DDP: ('#009E73', '^', '-'),
    MPI4PY: ('#CC79A7', 'v', '-'),
    'ring, as in NCCL': ('#000000', '<', '-.'),
    MOSAIC: ('#000000', '<', '-'),
    WEBDATASET: ('#777777', '>', '-'),
    'lower bound': ('#777777', 'd', '--'),
    'create': ('#0072B2', 'o', '-'),
    'check': ('#56B4E9', 'D', '--'),
    'deadlock': ('#004D80', 'X', '-'),
    'stall warning': ('#777777', '>', '-.'),
    'timeout': ('#000000', '<', ':'),
}


def in_order(names: Iterable[str]) -> list[str]:
    """Return names in the order of ``STYLES``, then the other names."""
    order = list(STYLES)
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def parser(doc: str, rounds: int, ranks: int = 0, takes_torch: bool = False
           ) -> argparse.ArgumentParser:
    """Make a parser with the options that all these benchmarks have in common."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    if ranks:
        made.add_argument('--ranks', type=int, default=ranks, help='default: %(default)s')
    made.add_argument('--rounds', type=int, default=rounds, help='default: %(default)s')
    if takes_torch:
        made.add_argument('--torch', default=sys.executable, metavar='PYTHON',
                          help='Python with torch; default: this one')
    made.add_argument('--quick', action='store_true', help='one short round, as a test')
    made.add_argument('--svg', metavar='FILE', help='plot all rounds (matplotlib)')
    made.add_argument('--work', help=argparse.SUPPRESS)
    made.add_argument('--folder', help=argparse.SUPPRESS)
    if '--work' in sys.argv:
        sys.excepthook = _fail
    return made


def _fail(*error: Any) -> None:
    """Exit at once, so that mpiexec ends the other processes, which may wait for this one."""
    traceback.print_exception(*error)
    os._exit(1)


def local(ranks: int) -> Launcher:
    """Return a function that puts mpiexec before a command, for ranks on this machine."""
    next_to_python = pathlib.Path(sys.executable).with_name('mpiexec')
    mpiexec = str(next_to_python) if next_to_python.exists() else 'mpiexec'
    return lambda command: [mpiexec, '-n', str(ranks), *command]


def environment(kind: str) -> dict[str, str]:
    """Return the environment for processes of a kind, with one thread per process."""
    env = {key: value for key, value in os.environ.items() if key != 'PYTHONPATH'}
    env |= dict.fromkeys(['OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'], '1')
    env |= {'CHAINERMN_OVERLAY': '1', 'CHAINERMN_TIMELINE': ''}
    return env | KINDS[kind]


class Group:
    """The processes of one of the ``KINDS``."""

    def __init__(self, script: str, kind: str, ranks: int, folder: str, python: str,
                 mpiexec: Launcher) -> None:
        for name in ('answers', *range(ranks)):
            os.mkfifo(f'{folder}/{kind}.{name}')
        self._process = subprocess.Popen(
            mpiexec([python, '-W', 'ignore', str(pathlib.Path(script).resolve()),
                     '--work', kind, '--folder', folder]),
            env=environment(kind), cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self._commands: list[int] = []
        self._files = contextlib.ExitStack()
        self._where = f'{folder}/{kind}'
        self._ranks = ranks

    def connect(self) -> None:
        """Wait until all processes are ready to receive commands."""
        for rank in range(self._ranks):
            self._commands.append(self._open(f'{self._where}.{rank}'))
            self._files.callback(os.close, self._commands[-1])
        self._answers = open(f'{self._where}.answers')  # noqa: SIM115
        self._files.callback(self._answers.close)

    def _open(self, path: str) -> int:
        """Wait until the process has opened the pipe for reading, then open it for writing."""
        while True:
            try:
                return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                if self._process.poll() is not None:
                    raise RuntimeError('a process exited during startup') from None
                time.sleep(.05)

    def ask(self, command: Any) -> Any:
        """Send a command to all processes, wait, and return the answer of rank 0."""
        for pipe in self._commands:
            os.write(pipe, f'{json.dumps(command)}\n'.encode())
        answer = self._answers.readline()  # '' if the process at the other end has exited
        if not answer:
            raise RuntimeError(f'the processes exited with status {self._process.wait()}')
        return json.loads(answer)

    def end(self, failure: Any = None, *_: Any) -> None:
        """End the processes, which are idle unless there is a failure."""
        self._files.close()
        try:
            self._process.wait(0 if failure else 30)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()


@contextlib.contextmanager
def groups(script: str, ranks: int, kinds: Sequence[str] = (V8, V7),
           torch: str = sys.executable, mpiexec: Launcher | None = None,
           ) -> Iterator[dict[str, Group]]:
    """Start a group of each kind, which runs ``script --work KIND``.

    Args:
        script: Path of the benchmark.
        ranks: Number of ranks in each group.
        kinds: Names in ``KINDS``.
        torch: Python for the kinds that use PyTorch.
        mpiexec: Function that makes the command to start another command on all ranks; by default,
            on this machine.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('time limit reached'))  # also ends the groups
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        started = {}
        for kind in kinds:
            python = torch if kind.startswith(TORCH) else sys.executable
            started[kind] = Group(script, kind, ranks, folder, python,
                                  mpiexec or local(ranks))
            stack.push(started[kind].end)
        for group in started.values():
            group.connect()
        yield started


def has_torch(python: str) -> bool:
    """Return whether a Python can import torch; print a line if it cannot."""
    tried = subprocess.run([python, '-c', 'import torch'], capture_output=True, check=False)
    if tried.returncode:
        print(f'{TORCH} is skipped: {python} cannot import torch')
    return tried.returncode == 0


def answer(kind: str, folder: str, rank: int, do: Callable[[Any], Any]) -> None:
    """In the processes of a group: call ``do`` with each command; rank 0 sends the results."""
    with open(f'{folder}/{kind}.{rank}') as commands, contextlib.ExitStack() as stack:
        file = stack.enter_context(open(f'{folder}/{kind}.answers', 'w')) if rank == 0 else None
        for command in commands:
            result = do(json.loads(command))
            if file:
                print(json.dumps(result), file=file, flush=True)


def ratios(a: list[float], b: list[float]) -> list[float]:
    """Return the ratio in each round."""
    return [x / y for x, y in zip(a, b, strict=True)]


def times(a: list[float], b: list[float]) -> str:
    """Return a text with the median of the ratios, the minimum and the maximum."""
    each = ratios(a, b)
    return f'{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f}) times'


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = '') -> None:
    """Print a table, which ``_tables.py`` finds by the dashes under its heading.

    ``None`` becomes an empty cell.
    """
    cells = [columns, *([cell(each) for each in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ['-' * width for width in widths])
    print(f'\n{caption}' if caption else '')
    for row in cells:
        print('  '.join(text.rjust(width) if text.lstrip('-')[:1].isdigit() else text.ljust(width)
                        for text, width in zip(row, widths, strict=True)).rstrip())
    print(flush=True)


def cell(value: Any) -> str:
    """Return the text of a cell: three digits of measured numbers, all digits of counts (``int``).

    >>> [cell(value) for value in (1234.5, 12.345, .9996, .01234, 12345, 'flat', None)]
    ['1,230', '12.3', '1.00', '0.0123', '12,345', 'flat', '']
    """
    if not isinstance(value, float):
        return '' if value is None else f'{value:,}' if isinstance(value, int) else str(value)
    value = float(f'{value:.3g}')
    if value == 0:
        return '0'
    return f'{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}'


def show(what: str, a: list[float], b: list[float], goal: float) -> str:
    """Return a line about the ratio of ChainerMN 8 (a) to ChainerMN 7 (b)."""
    return f'{what}, {V8} over {V7}: {times(a, b)}; goal {goal:g}'


def load() -> str:
    """Return a text about how busy the machine is."""
    return (f'load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores')


def axes_of(height: float, n: int = 1, n_rows: int = 1) -> tuple['Figure', list['Axes']]:
    """Return a figure that is readable on a phone, and its axes: ``n`` in each row."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot

    pyplot.rcParams['font.size'] = 12
    figure, axes = pyplot.subplots(n_rows, n, figsize=(5.5, height), layout='constrained',
                                   squeeze=False)
    return figure, list(axes.flat)


def chart(path: str, title: str, label: str, series: dict[str, dict[str, list[float]]],
          lines: dict[str, float] | None = None, is_log: bool = False) -> None:
    """Draw the values of each row: a point for each round, and a stroke for the median.

    Args:
        path: Path of the SVG.
        title: Title above the plot.
        label: Label of the axis of values, with the unit.
        series: Values by name in ``STYLES`` and row.
        lines: Values that are drawn as lines for comparison, by name.
        is_log: Whether the axis is logarithmic.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    names = in_order(series)
    rows = list(dict.fromkeys(row for name in names for row in series[name]))
    # Do not wrap between a number and its unit.
    labels = [textwrap.fill(re.sub(r'(\d) (?=\w)', '\\1\u00a0', row), 22) for row in rows]
    n_lines = sum(label.count('\n') for label in labels)
    figure, (axes,) = axes_of(1.6 + len(rows) * (.2 + .15 * len(series)) + .1 * n_lines)
    for name in names:
        color, marker, _ = STYLES[name]
        for row, values in series[name].items():
            here = [each for each in names if row in series[each]]
            y = rows.index(row) + .8 * ((here.index(name) + .5) / len(here) - .5)
            axes.plot(values, [y] * len(values), marker, color=color, alpha=.35)
            axes.plot(statistics.median(values), y, '|', color=color, markersize=18,
                      markeredgewidth=3)
        axes.plot([], [], marker, color=color, label=name)
    for name, value in (lines or {}).items():
        axes.axvline(value, linestyle='--', color=STYLES[name][0], label=name)
    if is_log:
        axes.set_xscale('log')
        plain = FuncFormatter(lambda x, _: f'{x:,g}')
        sparse = FuncFormatter(lambda x, _: f'{x:,g}' if f'{x:e}'[0] in '25' else '')
        low, high = axes.get_xlim()
        axes.xaxis.set_major_formatter(plain)
        axes.xaxis.set_minor_formatter(
            plain if high < 4 * low else sparse if high < 40 * low else NullFormatter())
    elif all(min(values) >= 0 for each in series.values() for values in each.values()):
        axes.set_xlim(0, None)
    axes.set(xlabel=textwrap.fill(label, 34), yticks=range(len(rows)), yticklabels=labels,
             ylim=(len(rows) - .5, -.5))
    axes.grid(axis='x', alpha=.3)
    figure.suptitle(title)
    if len(series) + len(lines or {}) > 1:
        add_legend(figure, axes)
    save(figure, path)


def add_legend(figure: 'Figure', axes: 'Axes') -> None:
    """Add a legend below the axes."""
    figure.legend(*axes.get_legend_handles_labels(), loc='outside lower center', ncols=2,
                  frameon=False)


def save(figure: 'Figure', path: str) -> None:
    """Save a figure as SVG. Its labels remain text instead of outlines."""
    from matplotlib import pyplot

    pathlib.Path(path).write_text(svg.from_figure(figure), encoding='utf-8')
    pyplot.close(figure)
