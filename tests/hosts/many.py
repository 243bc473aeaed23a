"""Checks a job on many hosts.

Updates of a model must be equal to those of one process that has all examples, and every collective
must give the results of NumPy.
"""

import pathlib
import socket
import sys

import chainer
import numpy as np
from means import is_same_everywhere

import chainermn

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from contract import CASES, OF_ARRAYS, Array, agree, play, step, steps_of

EXAMPLES = 3  # per rank


def model_of(seed):
    random = np.random.RandomState(seed)
    model = chainer.Sequential(chainer.links.Linear(30, 20), chainer.links.Linear(20, 2))
    for param in model.params():
        param.array = random.standard_normal(param.shape).astype(np.float32)
    return model


def parameters_after(model, optimizer, batches):
    """Train with all batches; return the parameters."""
    optimizer.setup(model)
    for batch in batches:
        optimizer.update(lambda batch=batch: chainer.functions.mean(model(batch) ** 2))
    return [param.array for _, param in sorted(model.namedparams())]


def check_updates(comm):
    batches = np.random.RandomState(0).standard_normal((4, comm.size, EXAMPLES, 30)).astype('f')
    results = parameters_after(
        model_of(comm.rank),
        chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(), comm),
        batches[:, comm.rank])
    assert is_same_everywhere(comm, *results)
    expected = parameters_after(
        model_of(0), chainer.optimizers.MomentumSGD(),
        batches[1:].reshape(3, -1, 30))  # the first update only broadcasts
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-5, atol=1e-6)


def main():
    for name in ('flat', 'naive'):
        comm = chainermn.create_communicator(name)
        check_updates(comm)
        agree([play(comm, step(name, comm.size)) for name in CASES])
        for x in Array(), Array(shape=(3000,)):
            agree([play(comm, calls) for name in OF_ARRAYS
                   for calls in steps_of(name, comm.size, x, ['sum', 'max'])])
        comm.finalize()
    sys.stdout.write(f'all right on {socket.gethostname()}\n')


if __name__ == '__main__':
    main()
