"""The ImageNet example, on a few small images, for two steps."""

import runpy

import numpy as np
import pytest

pytestmark = [pytest.mark.mpi_skip, pytest.mark.limit(180)]


@pytest.mark.slow
def test_mixed16_stops_and_goes_on(run, tmp_path):
    output = run('imagenet/make_images.py', '--train', '6', '--val', '2', ranks=1)
    assert '60 images' in output
    output = run('imagenet/compute_mean.py')
    assert output == 'mean.npy: the mean of 60 images, shape (3, 64, 64)\n'

    train = ('imagenet/train_imagenet.py', '--mean', 'mean.npy', '--insize', '32',
             '--batchsize', '4', '--dtype', 'mixed16', '--autoload')
    output = run(*train, '--iteration', '2')
    assert '2 processes with 2 readers each; 30 images per process' in output
    result = tmp_path / 'result'
    assert {path.name for path in result.iterdir()} == {
        'log', 'snapshot_iter_2.0'}
    run(*train, '--iteration', '3', expected_events=[
        f'Resumed from iteration 2 of the snapshots in {result}'])
    assert {path.name for path in result.iterdir()} == {
        'log', 'snapshot_iter_2.0', 'snapshot_iter_3.0'}


def test_resnet50_is_the_one_of_the_paper(examples):
    model = runpy.run_path(examples / 'imagenet' / 'models.py')['ResNet50'](1000)
    assert model.count_params() == 25_557_032
    assert model(np.ones((2, 3, 32, 32), np.float32)).shape == (2, 1000)
