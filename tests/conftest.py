"""Keeps the ranks of a test run together: one outcome per test, one voice, one time limit.

Under ``mpiexec ... pytest --with-mpi`` every rank runs the same tests. After each phase of a
test (setup, call, teardown) the ranks tell each other how it went, and what failed on one rank
has failed on all; so no rank runs ahead, and rank 0 alone reports.
"""

import faulthandler
import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from typing import Any, TextIO

import hypothesis
import pytest

LIMIT = 60  # seconds that a test may take, unless it is marked with limit(seconds)
GRACE = 3  # seconds for the other ranks to write their stacks too

# Every rank must draw the same examples.
hypothesis.settings.register_profile('ranks', derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile('ranks')


@pytest.hookimpl(trylast=True)  # when there is a terminal reporter to take away
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line('markers', 'gpu: needs CuPy and a GPU, and is skipped without')
    config.addinivalue_line('markers', f'limit(seconds): may take longer than {LIMIT} seconds')

    import chainermn

    if not chainermn.__version__.startswith('8.'):
        raise pytest.UsageError(f'These tests are not for {chainermn.__file__}; install ours.')

    mpi_comm = None
    if config.getoption('--with-mpi'):
        from mpi4py import MPI

        mpi_comm = MPI.COMM_WORLD.Dup()  # so that no test can take our messages for its own
        # pytest removes old folders of tmp_path, which the ranks must not do to one another.
        folder = tempfile.mkdtemp(prefix=f'chainermn-tests-{mpi_comm.rank}-')
        os.environ['PYTEST_DEBUG_TEMPROOT'] = folder
        config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
        config.pluginmanager.register(Ranks(mpi_comm))
        if mpi_comm.rank > 0:
            config.pluginmanager.unregister(name='terminalreporter')
    if not config.getoption('usepdb'):
        config.pluginmanager.register(TimeLimit(0 if mpi_comm is None else mpi_comm.rank))


class Ranks:
    """Makes the outcome of every phase of every test the same on all ranks."""

    def __init__(self, mpi_comm: Any) -> None:
        self.mpi_comm = mpi_comm
        self.broken: list[str] = []  # files that could not be collected on this rank

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        tests = self.mpi_comm.allgather((self.broken, [item.nodeid for item in session.items]))
        for rank, (broken, nodeids) in enumerate(tests):
            if broken != tests[0][0] or nodeids != tests[0][1]:
                text = '\n'.join(broken)
                pytest.exit(f'rank {rank} has other tests than rank 0\n{text}', returncode=2)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        said = [] if report.passed else [report.longreprtext, *map('\n'.join, report.sections)]
        ranks = self.mpi_comm.allgather((report.outcome, '\n'.join(said)))
        if len(set(ranks)) > 1:
            report.outcome = 'failed'
            report.longrepr = '\n'.join(
                f'{outcome} on rank {rank} of {len(ranks)}\n{text}\n'
                for rank, (outcome, text) in enumerate(ranks)
                if outcome != 'passed'
            )
        return report


class TimeLimit:
    """Ends the process when a test takes too long, after writing the stacks of all its threads.

    A timer thread in C writes and the kernel kills, so a rank that waits within MPI, or
    holds the GIL, is ended too; mpiexec then ends the others.
    """

    def __init__(self, rank: int) -> None:
        folder = os.environ.get('CHAINERMN_TEST_STACKS')  # run_ranks.py prints what is there
        self.named = folder is not None
        # pytest captures file descriptor 2 during the tests.
        self.file: TextIO = open(f'{folder}/{rank}' if folder else os.dup(2), 'w')  # noqa: SIM115
        self.start('collecting', LIMIT)

    def start(self, name: str, seconds: int) -> None:
        if self.named:
            self.file.seek(0)
            self.file.truncate()
            self.file.write(f'{name}\n')
            self.file.flush()
        faulthandler.dump_traceback_later(seconds, file=self.file)
        signal.alarm(seconds + GRACE)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        marker = item.get_closest_marker('limit')
        self.start(item.nodeid, marker.args[0] if marker else LIMIT)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.start(f'ending with {int(exitstatus)}', LIMIT)  # MPI_Finalize can hang as well


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker('gpu') and (reason := _why_no_gpu()):
        pytest.skip(reason)


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
