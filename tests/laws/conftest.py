"""Fixtures of laws."""

import pytest

from chainermn.extensions._checkpointing import late_copies


@pytest.fixture
def small_states_are_copied_late(monkeypatch):
    """Let small states be copied late, as large ones are: models are small here."""
    monkeypatch.setattr(late_copies, '_SMALL', 0)
