"""Shared code of the laws about checkpoints: checkpointers, and a comparison of states."""

import numpy as np
import pytest
from killed_jobs import new_folder

import chainermn

#: The marks of all modules with these laws.
MARKS = [
    pytest.mark.usefixtures('small_states_are_copied_late'),
    pytest.mark.limit(120),
    pytest.mark.filterwarnings('ignore:overflow', 'ignore:invalid value', 'ignore:divide by zero',
                               'ignore:Non finite', 'ignore:iteration .* was saved by',
                               'ignore:A batch with no more than one sample')]


def folder_of(comm, tmp_path):
    """Return a new folder, the same on all ranks."""
    return new_folder(comm, comm.bcast_obj(str(tmp_path)))


def checkpointer_of(comm, folder, **options):
    return chainermn.create_multi_node_checkpointer('run', comm, path=folder, **options)


def killed(saver):
    """Bring a checkpointer to its state after a job was killed, with all files on disk."""
    saver._saver.flush()
    saver._saver.lock.release()


def assert_same(found, expected):
    """Assert that lists and dictionaries of arrays and numbers are identical."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value, key)
    else:
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            if isinstance(other, (dict, list)):
                assert_same(one, other)
            else:
                assert one == other, (step, one, other)
