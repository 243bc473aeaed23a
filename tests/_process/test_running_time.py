"""The clock counts no time in which the process was stopped."""

import pytest

from chainermn._process import running_time

pytestmark = pytest.mark.mpi_skip


def test_polls(monkeypatch):
    now = [100.]
    monkeypatch.setattr(running_time.time, 'monotonic', lambda: now[0])
    clock = running_time.RunningClock()
    for step, pause, counted in [(.2, .2, .2), (1.1, .2, 1.1), (3600, .2, 1.2), (5, 5, 5)]:
        before = clock.poll()
        now[0] += step
        assert clock.peek() == pytest.approx(before + min(step, 1))
        assert clock.poll(pause) == pytest.approx(before + counted)
