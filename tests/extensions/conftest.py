"""A communicator, folders, and a gate that stops the thread that writes checkpoints."""

import threading

import pytest
from shared_fixtures import communicators

from chainermn.extensions._checkpointing import late_copies

comm = communicators('naive')


class Gate:
    """Is pickled, by the thread that writes, only once the gate is open."""

    def __init__(self):
        self.is_open = threading.Event()

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        self.is_open.wait()
        return str, ()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.is_open.set()  # whatever happened, no thread stays


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks."""
    return comm.bcast_obj(str(tmp_path))


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """The current folder of this rank, in which a trainer creates its folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def small_states_are_copied_late(monkeypatch):
    """Copy small states late, because all models are small in these tests."""
    monkeypatch.setattr(late_copies, '_SMALL', 0)
