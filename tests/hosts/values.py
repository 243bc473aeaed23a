"""Checks results on several hosts: ``values.py RANKS_ON_HOST_0 RANKS_ON_HOST_1 ...``.

The means of gradients must be the same, bit for bit, on all ranks, and equal to the result of one
process; test_values.py also runs the contract tests.
"""

import hashlib
import socket
import sys

import chainer
import numpy as np

import chainermn

#: Of the gradients; together they take several chunks of ``flat``.
SHAPES = [(600, 1000), (7,), (), (3, 0, 2), (100, 513), (1,)]


def gradients(rank, dtype):
    random = np.random.RandomState(rank)
    return [random.standard_normal(shape).astype(dtype) for shape in SHAPES]


def is_same_everywhere(comm, *arrays):
    """Whether arrays are equal on all ranks, bit for bit."""
    digest = hashlib.sha256(b''.join(np.asarray(x).tobytes() for x in arrays)).digest()
    return len(set(comm.allgather_obj(digest))) == 1


def check_topology(comm, ranks):
    host = next(n for n in range(len(ranks)) if comm.rank < sum(ranks[:n + 1]))
    assert socket.gethostname() == f'node{host}'
    assert (comm.inter_rank, comm.inter_size) == (host, len(ranks))
    assert (comm.intra_rank, comm.intra_size) == (comm.rank - sum(ranks[:host]), ranks[host])


def check_gradients(comm, dtype):
    model = chainer.Link()
    with model.init_scope():
        for n, gradient in enumerate(gradients(comm.rank, dtype)):
            param = chainer.Parameter(np.zeros_like(gradient))
            param.grad = gradient
            setattr(model, f'p{n}', param)
    for _ in range(2):  # the second time with the same buffers
        for n, gradient in enumerate(gradients(comm.rank, dtype)):
            getattr(model, f'p{n}').grad = gradient
        comm.multi_node_mean_grad(model)
        results = [getattr(model, f'p{n}').grad for n in range(len(SHAPES))]
        assert is_same_everywhere(comm, *results)
        everyone = zip(*(gradients(rank, dtype) for rank in range(comm.size)), strict=True)
        for result, each in zip(results, everyone, strict=True):
            expected = np.mean([x.astype('f8') for x in each], 0)
            tolerance = 4 * comm.size * np.finfo(dtype).eps
            np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


def main():
    ranks = [int(n) for n in sys.argv[1:]]
    for name in ('flat', 'naive'):
        comm = chainermn.create_communicator(name)
        check_topology(comm, ranks)
        for dtype in ('float32', 'float64', 'float16') if name == 'flat' else ('float32',):
            check_gradients(comm, dtype)
        comm.finalize()
    sys.stdout.write(f'all right on {socket.gethostname()}\n')


if __name__ == '__main__':
    main()
