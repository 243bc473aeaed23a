"""Synchronizes the ranks of a test run: one outcome per test, one report, one time limit.

Under ``mpiexec ... pytest --with-mpi``, every rank runs the same tests. After each phase of a test
(setup, call, teardown), the ranks exchange outcomes; a failure on one rank is a failure on all.
Therefore, no rank runs ahead, and only rank 0 reports. Without mpiexec, pytest-xdist can run the
files in parallel.
"""

import faulthandler
import functools
import os
import pathlib
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Generator
from typing import Any, TextIO

import durations
import hypothesis
import pytest
from run_ranks import STACKS, outside_pytest
from time_limits import seconds

pytest_plugins = ['shared_fixtures']

LIMIT = 60  # seconds that a test may take on a quiet machine, unless it is marked with limit(...)
LIMIT_ON_GPU = 150  # longer, because CuPy compiles kernels on first use
GRACE = 3  # seconds for the other ranks to write their stacks

# Every rank must draw the same examples.
hypothesis.settings.register_profile(
    'full', derandomize=True, database=None, deadline=None, max_examples=100)
hypothesis.settings.register_profile('fast', hypothesis.settings.get_profile('full'),
                                     max_examples=30)

#: Matches files with slow tests. Laws have slow cases without using the marker in their files.
HAS_SLOW = re.compile(r'slow|^@law\(', re.MULTILINE)
#: Match the module-level markers of files whose tests all run in one process, or on a GPU.
ALL_IN_ONE_PROCESS = re.compile(r'^pytestmark = \[?[^]]*?pytest\.mark\.mpi_skip', re.MULTILINE)
ALL_ON_GPU = re.compile(r'^pytestmark = \[?[^]]*?pytest\.mark\.gpu', re.MULTILINE)

#: Matches the name of a communicator in the name of a test.
COMMUNICATOR = re.compile(r'(?<=[\[-])(naive|flat)(?=[\]-])')

MARKERS = f"""
every_size: depends on the number of ranks; also runs at 2 ranks, and in CI at 4
slow: runs with --full or -m slow; CI runs -m slow after README's test command
full: takes longer or overlaps with other tests; only runs with --full
compares_calls: needs a communicator that compares the calls of all ranks, unlike version 7
gpu: needs CuPy and a GPU; otherwise skipped
sample(n): runs n of its cases, spread evenly; all of them with --full
limit(seconds): may take longer than {LIMIT} seconds on an idle machine
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--full', action='store_true', help='also run tests marked full')
    parser.addoption('--stop-after', type=float, metavar='SECONDS',
                     help='skip all tests that would start later, and report')


@pytest.hookimpl(trylast=True)  # last, when the terminal reporter exists, so that it can be removed
def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS.strip().splitlines():
        config.addinivalue_line('markers', marker)

    hypothesis.settings.load_profile('full' if config.getoption('full') else 'fast')

    import chainermn

    if not chainermn.__version__.startswith('8.'):
        raise pytest.UsageError(f'These tests need ChainerMN 8, not {chainermn.__file__}.')

    mpi_comm = ranks = None
    if config.getoption('--with-mpi'):
        from mpi4py import MPI

        mpi_comm = MPI.COMM_WORLD.Dup()  # separates our messages from those of the tests
        # pytest removes old folders of tmp_path. A rank must not remove the folders of other ranks.
        folder = tempfile.mkdtemp(prefix=f'chainermn-tests-{mpi_comm.rank}-')
        os.environ['PYTEST_DEBUG_TEMPROOT'] = folder
        config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
        ranks = Ranks(mpi_comm)
        config.pluginmanager.register(ranks)
        if mpi_comm.rank > 0:
            config.pluginmanager.unregister(name='terminalreporter')
    if config.getoption('dist', 'no') != 'no':
        config.pluginmanager.register(Workers())
    elif not config.getoption('usepdb'):
        worker = getattr(config, 'workerinput', {'workerid': '0'})['workerid']
        name = worker if mpi_comm is None else str(mpi_comm.rank)
        config.pluginmanager.register(TimeLimit(name, ranks))
        if STACKS in os.environ:
            is_first = mpi_comm is None or mpi_comm.rank == 0
            config.pluginmanager.register(
                durations.Recorder(os.environ[STACKS], name, is_first))
    if config.getoption('stop_after') is not None:
        config.pluginmanager.register(StopAfter(config.getoption('stop_after'), mpi_comm))


def pytest_report_header() -> str:
    return f'tests on a GPU: {_why_no_gpu() or "yes"}'


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Skip files without tests for this run, before their imports take time."""
    if collection_path.suffix != '.py' or collection_path.name == 'conftest.py':
        return None
    text = collection_path.read_text(encoding='utf-8')
    chosen = config.getoption('markexpr')
    is_for_others = (
        (chosen == 'every_size' and chosen not in text)
        or (chosen == 'slow' and not HAS_SLOW.search(text))
        or (_leaves_out_gpu(config) and ALL_ON_GPU.search(text))
        or (config.getoption('with_mpi') and ALL_IN_ONE_PROCESS.search(text)))
    return True if is_for_others else None


@pytest.hookimpl(tryfirst=True)  # before -m selects tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = set()  # markers of tests that are not for this run
    if not config.getoption('full'):
        others.add('full')
        if config.getoption('markexpr') != 'slow':
            others.add('slow')
    if config.getoption('with_mpi'):
        others.add('mpi_skip')
    if _leaves_out_gpu(config):
        others.add('gpu')
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    cases: dict[str, list[pytest.Item]] = {}  # cases of tests that are marked sample
    if not config.getoption('full'):
        for item in items:
            if item.get_closest_marker('sample') and not item.get_closest_marker('full'):
                cases.setdefault(item.nodeid.partition('[')[0], []).append(item)
    unsampled = {item.nodeid for group in cases.values() for item in _unsampled(group)}
    if (config.getoption('with_mpi') and not config.getoption('full')
            and config.getoption('markexpr') in ('', 'every_size')):
        from mpi4py import MPI

        unsampled.update(_of_other_runs([item.nodeid for item in items], MPI.COMM_WORLD.size))
    for item in items:
        is_other = item.nodeid in unsampled or _is_beyond_version7(
            item, config.getoption('with_mpi')) or not others.isdisjoint(
            marker.name for marker in item.iter_markers())
        (left_out if is_other else chosen).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


def _is_beyond_version7(item: pytest.Item, has_ranks: bool) -> bool:
    """Return whether a test must not run with the communicator of version 7."""
    callspec = getattr(item, 'callspec', None)
    return callspec is not None and callspec.params.get('comm') == 'version7' and (
        not has_ranks or item.get_closest_marker('compares_calls') is not None)


def _unsampled(cases: list[pytest.Item]) -> list[pytest.Item]:
    marker = cases[0].get_closest_marker('sample')
    assert marker is not None
    n, = marker.args
    # Take one case from each n-th part. A fixed step would always take the same value of a
    # parameter.
    sampled = {int((k + k * .618 % 1) * len(cases) / n) for k in range(n)}
    return [item for k, item in enumerate(cases) if k not in sampled]


def _of_other_runs(nodeids: list[str], size: int) -> list[str]:
    """Return cases that do not run at this number of ranks without --full."""
    return _of_other_communicator(nodeids) if size == 3 else _of_other_half(nodeids, size == 2)


def _of_other_communicator(nodeids: list[str]) -> list[str]:
    """Return every other case of naive, and the remaining cases of flat."""
    names: dict[str, dict[str, str]] = {}  # by test, without the name of the communicator
    for nodeid in nodeids:
        if found := COMMUNICATOR.search(nodeid):
            names.setdefault(COMMUNICATOR.sub('', nodeid), {})[found[0]] = nodeid
    pairs = [cases for cases in names.values() if len(cases) == 2]
    return [cases['flat' if k % 2 else 'naive'] for k, cases in enumerate(pairs)]


def _of_other_half(nodeids: list[str], is_first: bool) -> list[str]:
    """Return half of the cases of each test: 2 ranks skip one half, 4 ranks the other."""
    tests: dict[str, list[str]] = {}
    for nodeid in nodeids:
        tests.setdefault(nodeid.partition('[')[0], []).append(nodeid)
    # A fixed step would always take the same value of a parameter.
    return [nodeid for cases in tests.values() if len(cases) > 1
            for k, nodeid in enumerate(cases) if int(k * .618 % 1 * 2) == is_first]


class Ranks:
    """Makes the outcome of each test phase the same on all ranks."""

    def __init__(self, mpi_comm: Any) -> None:
        self.mpi_comm = mpi_comm
        self.broken: list[str] = []  # files that could not be collected on this rank
        #: The factor of time limits, the same on all ranks.
        self.slowness: float = mpi_comm.bcast(seconds(1))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        tests = self.mpi_comm.allgather((self.broken, [item.nodeid for item in session.items]))
        for rank, (broken, nodeids) in enumerate(tests):
            if broken != tests[0][0] or nodeids != tests[0][1]:
                text = '\n'.join(broken)
                pytest.exit(f'rank {rank} and rank 0 collected different tests\n{text}',
                            returncode=2)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        texts = [] if report.passed else [report.longreprtext, *map('\n'.join, report.sections)]
        reports = self.mpi_comm.allgather((report.outcome, '\n'.join(texts), seconds(1)))
        self.slowness = reports[0][2]
        ranks = [each[:2] for each in reports]
        if len(set(ranks)) > 1:
            report.outcome = 'failed'
            report.longrepr = '\n'.join(
                f'{outcome} on rank {rank} of {len(ranks)}\n{text}\n'
                for rank, (outcome, text) in enumerate(ranks)
                if outcome != 'passed'
            )
        return report


class TimeLimit:
    """Kills the process if a test takes too long, after writing the stacks of all threads.

    A C thread writes the stacks, and the kernel kills the process. This also works if a rank waits
    in MPI or holds the GIL. Then mpiexec kills the other ranks; pytest-xdist starts a new worker.
    """

    def __init__(self, name: str, ranks: Ranks | None) -> None:
        self.ranks = ranks
        folder = os.environ.get(STACKS)  # run_ranks.py prints its files
        self.named = folder is not None
        # pytest captures file descriptor 2 during the tests.
        self.file: TextIO = open(f'{folder}/{name}' if folder else os.dup(2), 'w')  # noqa: SIM115
        self.start('collecting', 3 * LIMIT)  # all workers do, and other programs may run

    def start(self, name: str, quiet: float) -> None:
        self.write(name)
        # The same on all ranks, so that all write their stacks.
        limit = seconds(quiet) if self.ranks is None else quiet * self.ranks.slowness
        faulthandler.dump_traceback_later(limit, file=self.file)
        signal.setitimer(signal.ITIMER_REAL, limit + GRACE)

    def write(self, name: str) -> None:
        """Write the current test or phase."""
        if self.named:
            self.file.seek(0)
            self.file.truncate()
            self.file.write(f'{name}\n')
            self.file.flush()

    def pause(self) -> None:
        """Stop the timer of a worker, which may wait for other workers."""
        if self.ranks is None:
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self.pause()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        limit = LIMIT_ON_GPU if item.get_closest_marker('gpu') else LIMIT
        marker = item.get_closest_marker('limit')
        self.start(item.nodeid, marker.args[0] if marker else limit)
        result = yield
        self.pause()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:  # the other ranks may wait for this one until the time limit
            self.write(f'{item.nodeid}\n{report.longreprtext}')
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.start(f'ending with {int(exitstatus)}', LIMIT)  # MPI_Finalize can also hang


class StopAfter:
    """Skips all tests that would start after a number of seconds, on all ranks."""

    def __init__(self, duration: float, mpi_comm: Any) -> None:
        self.end = time.monotonic() + duration
        self.mpi_comm = mpi_comm

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        is_late = time.monotonic() > self.end
        if self.mpi_comm is not None:
            is_late = self.mpi_comm.bcast(is_late)
        if is_late:
            pytest.skip('--stop-after: no time left')


class Workers:
    """Reports the stacks of a killed pytest-xdist worker."""

    def __init__(self) -> None:
        self.folder = os.environ.get(STACKS)

    def write(self, name: str, text: str) -> None:
        if self.folder:
            pathlib.Path(self.folder, name).write_text(text)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: Any) -> None:
        if self.folder:
            worker = report.node.gateway.id
            name, *stacks = pathlib.Path(self.folder, worker).read_text().splitlines()
            report.longrepr += f'\n{outside_pytest(stacks)}'
            self.write(worker, name)  # run_ranks.py need not print it again

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write('0', f'ending with {int(exitstatus)}\n')


@pytest.fixture
def default_signals() -> Generator[None]:
    """Restores the default action of signals for processes started by a test.

    A new process inherits ignored signals from its parent: SIGHUP under nohup, SIGINT in the
    background of a shell script.
    """
    ignored = [number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
               if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker('gpu') and (reason := _why_no_gpu()):
        pytest.skip(reason)


def _leaves_out_gpu(config: pytest.Config) -> bool:
    """Return whether tests on a GPU are deselected; if ``-m`` selects them, they are skipped."""
    return 'gpu' not in config.getoption('markexpr') and bool(_why_no_gpu())


@functools.cache
def _why_no_gpu() -> str:
    try:
        import cupy
    except ImportError:
        return 'needs CuPy'
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as e:
        return f'needs a GPU: {e}'
    return ''
