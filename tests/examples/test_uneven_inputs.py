"""The example of uneven inputs, for two batches of each process, and two steps with all options."""

import pytest


@pytest.mark.full
def test_two_batches(run, tmp_path):
    output = run('uneven_inputs/train_uneven.py', '--epoch', '1', '--iteration', '2')
    assert output.count('validation accuracy') == 1
    assert 'batches per process [2, 2]  steps so far 1 ' in output
    assert (tmp_path / 'result' / 'model.npz').exists()


@pytest.mark.slow
def test_an_uneven_epoch_with_all_options(run):
    output = run('uneven_inputs/train_uneven.py', '--epoch', '2', '--batchsize', '120',
                 '--divide-by-active', '--n-accumulations', '2', '--compression', '2bit')
    # Of the 8 larger batches the first is for the broadcast, and the last of 7 makes a step alone.
    assert 'batches per process [4, 8]  steps so far 4 ' in output
    assert 'batches per process [4, 8]  steps so far 8 ' in output
