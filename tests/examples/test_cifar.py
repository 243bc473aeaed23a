"""The CIFAR example, for two steps."""

import pytest


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize('options', [[], ['--mnbn']])
def test_two_steps(run, tmp_path, options):
    output = run('cifar/train_cifar.py', '--iteration', '2', '--width', '2', *options)
    assert '2 processes; 719 examples per process' in output
    assert output.count('Validation accuracy') == 1
    assert {path.name for path in (tmp_path / 'result').iterdir()} == {'log', 'snapshot_iter_2'}
