"""The DCGAN example, for two steps and one more."""

import pytest


@pytest.mark.slow
def test_two_steps(run, tmp_path):
    output = run('dcgan/train_dcgan.py', '--iteration', '2', '--width', '4')
    assert output.count('2 processes; 899 images per process') == 1
    result = tmp_path / 'result'
    assert {path.name for path in result.iterdir()} == {'log', 'preview', 'snapshot_iter_2'}

    run('dcgan/train_dcgan.py', '--iteration', '3', '--width', '4',
        '--resume', 'result/snapshot_iter_2')
    sheets = sorted((result / 'preview').iterdir())
    assert [path.name for path in sheets] == ['000002.png', '000003.png']
    assert sheets[0].read_bytes().startswith(b'\x89PNG')
