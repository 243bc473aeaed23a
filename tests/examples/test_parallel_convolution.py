"""The parallel convolution example is one network on any number of processes."""

import json

import pytest


@pytest.mark.slow
def test_two_steps_are_the_same_on_one_and_two_processes(run, tmp_path):
    losses = []
    for ranks in 1, 2:
        run('parallel_convolution/train_parallel_conv.py', '--iteration', '2', ranks=ranks)
        entry, = json.loads((tmp_path / 'result' / 'log').read_text())
        losses.append([entry['main/loss'], entry['validation/main/loss']])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
