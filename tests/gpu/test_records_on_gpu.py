"""Records of runs on a GPU: compared with a run on a CPU, and with another seed of CuPy."""

import pathlib

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn
from chainermn._records import differences, run_record, settings
from chainermn._records.read import RecordedRun

pytestmark = pytest.mark.gpu

DROPOUT = .5


@pytest.fixture
def record(naive, device, tmp_path):
    """Return a function: it trains, and returns the record; and the name of the GPU."""
    import cupy

    folder = pathlib.Path(naive.bcast_obj(str(tmp_path)))

    def record(name, place='@numpy', ratio=0., scale=1., seed=0):
        np.random.seed(0)
        cupy.random.seed(seed)
        model = chainer.Sequential(
            L.Linear(5, 20), F.tanh, lambda x: F.dropout(x, ratio) if ratio else x, L.Linear(20, 3))
        model.to_device(place)
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.MomentumSGD(.05), naive).setup(model)
        recording = run_record.record(optimizer, str(folder / name), 1)
        draw = np.random.RandomState(naive.rank)
        for number in range(8):
            x, t = draw.randn(6, 5).astype('f'), draw.randint(0, 3, 6)
            factor = scale if number == 5 else 1
            with chainer.using_device(model.device):
                optimizer.update(
                    lambda x, t, factor=factor: factor * F.softmax_cross_entropy(model(x), t),
                    *map(model.device.send, (x, t)))
        recording.close()
        naive.mpi_comm.Barrier()
        return RecordedRun(folder / name)

    return record, f'@cupy:{device.id}'


def test_gpu_and_cpu(record):
    """The difference is rounding; a cause after it is found."""
    record, gpu = record
    on_cpu, on_gpu = record('cpu'), record('gpu', gpu)
    assert settings.differing(on_cpu.ranks['rank0'], on_gpu.ranks['rank0']) == {
        'device': ('@numpy', '@cupy')}
    assert [each for each in differences.between(on_cpu, on_gpu) if not each.is_rounding] == []
    assert differences.between(on_gpu, record('same', gpu)) == []
    first, second = differences.between(on_cpu, record('other', gpu, scale=1.5))
    assert first.is_rounding
    assert (second.what, second.update) == ('the loss', 5)


def test_seed_of_cupy(record):
    record, gpu = record
    a, b = record('a', gpu, DROPOUT), record('b', gpu, DROPOUT, seed=1)
    found, = differences.between(a, b)
    assert (found.what, found.update) == ('the seed of the random numbers of CuPy', 1)
    assert found.notes == ['The next difference: the loss, update 1, rank0.']
    assert differences.between(a, record('c', gpu, DROPOUT)) == []
