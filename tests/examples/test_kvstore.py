"""The KVStore examples: the line is found, and digits take two steps with every type of store."""

import re

import numpy as np
import pytest


@pytest.mark.sample(1)
@pytest.mark.parametrize('type, ranks', [('local', 1), ('dist_sync', 2), ('dist_async', 3)])
def test_linear_regression(run, tmp_path, type, ranks):
    output = run('kvstore/linear_regression.py', '--kvstore', type, ranks=ranks)
    assert output.startswith(f'{ranks} process{"es" * (ranks > 1)}, {type}: weight [ 2.  -3.4], '
                             'bias [4.2]\n')
    with np.load(tmp_path / 'result' / 'weights.npz') as found:
        np.testing.assert_allclose(found['weight'], [2, -3.4], atol=.02)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize('options, ranks', [
    (['--kvstore', 'local'], 1), (['--kvstore', 'dist_sync'], 2), (['--kvstore', 'dist_async'], 2),
    (['--kvstore', 'dist_async', '--compression', '0.01'], 2)])
def test_digits_two_steps(run, tmp_path, options, ranks):
    output = run('kvstore/train_digits.py', *options, '--iteration', '2', ranks=ranks)
    assert re.search(r'Validation accuracy: \d+\.\d\d%', output)
    assert (tmp_path / 'result' / 'model.npz').exists()
