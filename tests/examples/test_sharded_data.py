"""The example of sharded data: it writes files, and reads each example once per epoch."""

import json

import pytest


@pytest.mark.slow
def test_two_epochs(run, tmp_path):
    event = f"No checkpoint of run 'sharded' in {tmp_path / 'result'}: starting from the beginning"
    output = run('sharded_data/train_sharded.py', '--epoch', '2', '--skip-broken',
                 expected_events=[event])
    assert 'stopped after 100 iterations, 2.004 epochs' in output  # 100 * 2 * 16 of 1597 examples
    assert len([*(tmp_path / 'digits').glob('train-*.npz')]) == 100
    log = json.loads((tmp_path / 'result' / 'log').read_text())
    assert [entry['epoch'] for entry in log] == [1, 2]
    assert {entry['skipped_samples'] for entry in log} == {0}
    assert log[-1]['validation/main/accuracy'] > .8
