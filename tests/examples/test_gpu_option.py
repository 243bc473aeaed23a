"""With --gpu, each process of an example uses a different one of its visible GPUs."""

import multiprocessing
import pathlib
import runpy
import sys
import threading
import types

import chainer
import pytest
from mpi4py import MPI

import chainermn

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'
SCRIPTS = [path for path in sorted(EXAMPLES.glob('*/*.py')) if "'--gpu'" in path.read_text()]
SIZES = {'train_mnist_dual_parallel.py': (2, 4), 'train_mnist_model_parallel.py': (2,),
         'seq2seq_mp1.py': (2,)}


class TookError(Exception):
    """Ends an example when it has taken its device."""


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize('n_devices', [1, 2, 8])
@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_takes_a_device_that_it_sees(script, n_devices, monkeypatch, tmp_path):
    size = MPI.COMM_WORLD.size
    if size not in SIZES.get(script.name, (size,)):
        pytest.skip('runs on other numbers of processes')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, 'argv', [str(script), '--gpu', '--communicator', 'naive'])
    # imagenet prepares for its MultiprocessIterator.
    monkeypatch.setattr(multiprocessing, 'set_start_method', lambda method: None)
    monkeypatch.setattr(multiprocessing, 'Process', threading.Thread)
    runtime = types.SimpleNamespace(getDeviceCount=lambda: n_devices)
    monkeypatch.setattr(chainer.backends.cuda, 'cupy', types.SimpleNamespace(
        cuda=types.SimpleNamespace(runtime=runtime)), raising=False)
    comms, create = [], chainermn.create_communicator

    def create_communicator(*args):
        comms.append(create(*args))
        return comms[-1]

    def get_device(device):
        raise TookError(device)

    monkeypatch.setattr(chainermn, 'create_communicator', create_communicator)
    monkeypatch.setattr(chainer, 'get_device', get_device)
    modules = set(sys.modules)
    try:
        with pytest.raises(TookError) as taken:
            runpy.run_path(str(script), run_name='__main__')
    finally:
        for other in script.parent.glob('*.py'):  # another example may have one of that name
            if other.stem not in modules:
                sys.modules.pop(other.stem, None)
    comm, = comms
    assert taken.value.args == (comm.intra_rank % n_devices,)
    comm.finalize()
