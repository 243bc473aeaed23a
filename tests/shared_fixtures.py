"""Fixtures: every available communicator, and errors compared between ranks."""

import contextlib
import importlib.util
import pathlib
import re

import numpy as np
import pytest
from mpi4py import MPI
from overlapping_communicator import OverlappingCommunicator
from version7 import Version7Communicator

import chainermn
from chainermn.__main__ import main
from chainermn.communicators._nccl_communicator_base import NcclCommunicatorBase


def available():
    """Return the communicators for host arrays; tests/gpu covers the others."""
    names = []
    for name, (module, class_name) in chainermn.communicators._CLASSES.items():
        module = importlib.import_module(f'chainermn.communicators.{module}')
        found = getattr(module, class_name)
        try:
            found._check_requirements()
        except RuntimeError:
            continue
        if not issubclass(found, NcclCommunicatorBase):
            names.append(name)
    return names


def create(name):
    """Create a communicator: one of ours, a third-party one, or one that averages in a thread."""
    if name == 'overlapping':
        return OverlappingCommunicator(MPI.COMM_WORLD)
    return Version7Communicator() if name == 'version7' else chainermn.create_communicator(name)


def communicators(*names, min_size=1):
    """Return a fixture for the tests of a module: ``comm``, a communicator with each name."""
    @pytest.fixture(scope='module', params=names)
    def comm(request):
        comm = create(request.param)
        if comm.size < min_size:
            pytest.skip(f'takes {min_size} ranks')
        yield comm
        comm.finalize()
    return comm


@pytest.fixture(scope='session', params=available())
def name(request):
    """The name of a communicator."""
    return request.param


@pytest.fixture(scope='module')
def comm(name):
    comm = chainermn.create_communicator(name)
    yield comm
    comm.finalize()


@pytest.fixture
def naive():
    """A communicator that only one test uses."""
    comm = chainermn.create_communicator('naive')
    yield comm
    comm.finalize()


@pytest.fixture(scope='session')
def comms():
    """All communicators at once, for tests with many cases.

    'dummy' is not included, because it only differs from 'flat' in the means of gradients.
    """
    comms = [chainermn.create_communicator(name) for name in available() if name != 'dummy']
    yield comms
    for comm in comms:
        comm.finalize()


@pytest.fixture
def check():
    """Check dtype, shape and values of a result, and that it is writable and shares no memory."""
    def check(result, expected, *inputs):
        expected = np.array(expected, expected.dtype.newbyteorder('='))
        assert type(result) is np.ndarray
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        assert result.dtype.isnative
        np.testing.assert_array_equal(result, expected)
        assert result.flags.writeable
        assert not any(np.may_share_memory(result, x) for x in inputs)
    return check


@pytest.fixture
def same_error():
    """Call a function on all ranks and return its error, which must be the same on all ranks.

    ``failed`` is the only rank that failed, if any. Unless ``table`` is false, the message must
    have a line for each rank.
    """
    def same_error(call, *args, failed=None, table=True):
        try:
            error, text = None, call(*args)
        except Exception as caught:
            error, text = caught, str(caught)
        mpi_comm = MPI.COMM_WORLD
        errors = mpi_comm.allgather((str(type(error)), text if error else repr(text)))
        assert all(kind != str(type(None)) for kind, _ in errors), errors
        assert len(set(errors)) == 1, errors
        if mpi_comm.size > 1 and table:
            assert named_ranks(text) == list(range(mpi_comm.size)), text
        if mpi_comm.size > 1 and failed is not None:
            assert f'failed on rank {failed} (' in text
        return error
    return same_error


@contextlib.contextmanager
def raises_on_all(kind, *texts, match=None):
    """Check that all ranks raise the same error, which contains the texts."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    found = MPI.COMM_WORLD.allgather(str(caught.value))
    assert len(set(found)) == 1, found
    for text in texts:
        assert text in found[0]


def named_ranks(text):
    """Return the ranks in the table of an error."""
    ranks = set()
    for line in text.splitlines()[1:]:
        if 'failed on all ranks' in line:
            ranks.update(range(MPI.COMM_WORLD.size))
        for group in re.findall(r'\branks? (\d[\d, -]*\d|\d)(?=: |; |$)', line):
            for part in group.split(', '):
                first, _, last = part.partition('-')
                ranks.update(range(int(first), int(last or first) + 1))
    return sorted(ranks)


@pytest.fixture(scope='session')
def digits():
    """Load scikit-learn's digits without importing scikit-learn, which takes a second."""
    package, = importlib.util.find_spec('sklearn').submodule_search_locations
    rows = np.loadtxt(f'{package}/datasets/data/digits.csv.gz', delimiter=',')
    return rows[:, :-1], rows[:, -1].astype(int)


@pytest.fixture
def check_usable():
    """Check that later operations of a communicator give correct values."""
    def check_usable(comm):
        ranks = list(range(comm.size))
        assert comm.allgather_obj(comm.rank) == ranks
        assert comm.allreduce(np.float64(comm.rank)) == sum(ranks)
    return check_usable


@pytest.fixture
def shared_folder(comm, tmp_path, monkeypatch):
    """A new folder, the same on all ranks, which is their working directory."""
    path = comm.bcast_obj(str(tmp_path) if comm.rank == 0 else None)
    monkeypatch.chdir(path)
    return pathlib.Path(path)


@pytest.fixture
def usage_error(capfd):
    """Run a command, which must reject its arguments and start nothing; return its message."""
    def usage_error(*args):
        with pytest.raises(SystemExit) as end:
            main([*map(str, args)])
        out, err = capfd.readouterr()
        assert (end.value.code, out) == (2, '')
        return err
    return usage_error
