"""Compressors that fail on the last rank only: ``failing.py [uncaught]``.

All ranks must raise the same error, and can use the communicator afterwards.
"""

import pathlib
import socket
import sys

import numpy as np
from means import is_same_everywhere, model_of

import chainermn
from chainermn.communicators.compression import PowerSGD

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from failing_compressor import Fails


class PowerSGDFails(PowerSGD):
    """Raises before, or after, data is sent."""

    def __init__(self, method, call):
        super().__init__()
        self.method = method

    def _matrix(self, *args):
        if self.method == 'compress':
            raise MemoryError('too much')
        return super()._matrix(*args)

    def _store(self, *args):
        if self.method == 'decompress':
            raise MemoryError('too much')
        super()._store(*args)


def error_of(function, *args):
    try:
        function(*args)
    except Exception as error:
        assert type(error) is MemoryError, repr(error)
        return str(error)
    return ''


def background_mean(comm, model, compressor):
    queue = comm.mean_queue()
    for name, param in model.namedparams():  # two exchanges; the first one may fail
        queue.submit({name: param.grad}, compressor)
    queue.wait()


def main():
    comm = chainermn.create_communicator('flat')
    is_odd = comm.rank == comm.size - 1
    gradients = [np.full((600, 1000), comm.rank, np.float32), np.full(7, comm.rank, np.float32)]

    def mean(model, compressor):
        comm.multi_node_mean_grad(model, compression=compressor)

    if 'uncaught' in sys.argv:
        mean(model_of(gradients), Fails('decompress' if is_odd else '', 3))
    for kind in Fails, PowerSGDFails:
        for method in 'compress', 'decompress':
            for call in (1, 3) if kind is Fails else (1,):
                for function in mean, lambda *args: background_mean(comm, *args):
                    compressor = kind(method if is_odd else '', call)
                    text = error_of(function, model_of(gradients), compressor)
                    assert len(set(comm.allgather_obj(text))) == 1
                    assert f'failed on rank {comm.size - 1} (the gradients' in text, text
                    compressor.method = ''
                    model = model_of(gradients)
                    mean(model, compressor)
                    assert is_same_everywhere(comm, model.p0.grad, model.p1.grad)
    sys.stdout.write(f'all right on {socket.gethostname()}\n')


if __name__ == '__main__':
    main()
