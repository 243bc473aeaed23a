"""Fixtures of laws."""

import pytest

from chainermn.extensions._checkpointing import late_copies


@pytest.fixture
def small_states_are_copied_late(monkeypatch):
    """Copy small states late, as if they were large: all models are small in these tests."""
    monkeypatch.setattr(late_copies, '_SMALL', 0)
