"""The MNIST examples that split the model, and the one without Trainer, for two steps."""

import pytest


@pytest.mark.slow
def test_dual_parallel(run, tmp_path):
    script = 'mnist/train_mnist_dual_parallel.py'
    output = run(script, '--iteration', '2', ranks=4)
    assert '2 models of 2 stages; 719 examples per model' in output
    result = tmp_path / 'result'
    assert sorted(path.name for path in result.glob('snap*')) == [
        'snapshot_iter_2.0', 'snapshot_iter_2.1']


@pytest.mark.full
def test_custom_loop(run, tmp_path):
    script = 'mnist/train_mnist_custom_loop.py'
    output = run(script, '--iteration', '2')
    assert output.count('validation accuracy') == 1
    assert {path.name for path in (tmp_path / 'result').iterdir()} == {
        'model.npz', 'optimizer.npz'}
    run(script, '--iteration', '1', '--resume', 'result')
