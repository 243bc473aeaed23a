"""Checks means on several hosts, compressed and not: ``means.py RANKS_ON_HOST_0 ...``.

They must be the same, bit for bit, on all ranks, and near the mean computed in one process.
"""

import hashlib
import socket
import sys

import chainer
import numpy as np

import chainermn
from chainermn.communicators import compression

DTYPES = ['float16', 'float32', 'float64']
KINDS = [None, 'fp16', 'bf16', '2bit', 'powersgd']
#: The relative error of one rounding.
ROUNDING = {None: 0, 'fp16': 2**-11, 'bf16': 2**-8}
#: The shapes of gradients: several chunks, no elements, fewer elements than hosts.
MODELS = [[(600, 1000), (7,), (), (3, 0, 2), (100, 513), (1,)],
          [()], [(2,)], [(0,)], [(5, 3), (0,)]]


def is_same_everywhere(comm, *arrays):
    """Whether arrays are equal on all ranks, bit for bit."""
    digest = hashlib.sha256(b''.join(np.asarray(x).tobytes() for x in arrays)).digest()
    return len(set(comm.allgather_obj(digest))) == 1


def check_topology(comm, ranks):
    host = next(n for n in range(len(ranks)) if comm.rank < sum(ranks[:n + 1]))
    assert socket.gethostname() == f'node{host}'
    assert (comm.inter_rank, comm.inter_size) == (host, len(ranks))
    assert (comm.intra_rank, comm.intra_size) == (comm.rank - sum(ranks[:host]), ranks[host])


def model_of(gradients):
    model = chainer.Link()
    with model.init_scope():
        for n, gradient in enumerate(gradients):
            param = chainer.Parameter(np.zeros_like(gradient))
            param.grad = gradient.copy()
            setattr(model, f'p{n}', param)
    return model


def mean(comm, gradients, compressor):
    """Averages the gradients of a model."""
    model = model_of(gradients)
    comm.multi_node_mean_grad(model, compression=compressor)
    results = [getattr(model, f'p{n}').grad for n in range(len(gradients))]
    assert is_same_everywhere(comm, *results)
    for result, gradient in zip(results, gradients, strict=True):
        assert (result.dtype, result.shape) == (gradient.dtype, gradient.shape)
    return results


def mean_into_new_arrays(comm, gradients, compressor):
    """Averages the same gradients in the background."""
    own = [gradient.copy() for gradient in gradients]
    for gradient in own:
        gradient.flags.writeable = False
    queue = comm.mean_queue()
    results = queue.submit({f'/p{n}': gradient for n, gradient in enumerate(own)}, compressor)
    queue.wait()
    return results


def normal(rank, shapes, dtype):
    random = np.random.RandomState(rank)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def check_near_mean(comm, kind, shapes, dtype):
    """One step, whose result lies within the error of the compressor."""
    gradients = normal(comm.rank, shapes, dtype)
    results = mean(comm, gradients, compression.get(kind))
    others = mean_into_new_arrays(comm, gradients, compression.get(kind))
    everyone = zip(*(normal(rank, shapes, 'f8') for rank in range(comm.size)), strict=True)
    for result, other, each in zip(results, others, everyone, strict=True):
        assert result.tobytes() == other.tobytes()
        if kind in ROUNDING:
            error = 2 * max(ROUNDING[kind], np.finfo(dtype).eps)  # of the parts, and of the mean
            bound = error * np.mean(np.abs(each), 0) + 1e-6
            assert (np.abs(result - np.mean(each, 0)) <= bound).all()


def check_exact(comm, kind, shapes, dtype):
    """Values that the compressor can represent."""
    own = [np.arange(np.prod(shape)).reshape(shape) % 13 - 6 for shape in shapes]
    if kind == '2bit':  # it sends the threshold at most
        gradients, expected = [10 * x for x in own], [np.sign(x) / 2 for x in own]
    else:
        gradients, expected = [2 * comm.rank * x for x in own], [(comm.size - 1) * x for x in own]
    gradients = [np.asarray(x, dtype) for x in gradients]
    for result, value in zip(mean(comm, gradients, compression.get(kind)), expected, strict=True):
        np.testing.assert_array_equal(result, value)


def check_feedback(comm, shapes, dtype, steps=40):
    """In the end, everything but a few times the threshold is sent."""
    def clipped(rank):
        return [np.asarray(np.clip(x, -.4, .4)) for x in normal(rank, shapes, dtype)]

    compressor = compression.get('2bit')
    totals = [np.zeros(shape) for shape in shapes]
    for _ in range(steps):
        for total, result in zip(totals, mean(comm, clipped(comm.rank), compressor), strict=True):
            assert np.abs(result).max(initial=0) <= .5
            total += result
    for total, *each in zip(totals, *map(clipped, range(comm.size)), strict=True):
        np.testing.assert_allclose(total / steps, np.mean(each, 0, 'f8'), atol=1.5 / steps)


def check_power_sgd(comm, dtype, steps=4):
    """Compared with the algorithm in one process."""
    shape, rank = (30, 4, 10), 2
    wide = np.promote_types(dtype, 'float32')
    compressor = compression.PowerSGD(rank)
    errors = np.zeros((comm.size, 30, 40), wide)
    q = np.random.RandomState(30 * 65537).standard_normal((40, rank)).astype(wide)
    for step in range(steps):
        gradients = [normal(100 * step + r, [shape, (), (1, 1)], dtype) for r in range(comm.size)]
        matrices = np.array([x[0].reshape(30, 40) for x in gradients]) + errors
        p = np.linalg.qr(np.mean(matrices @ q, 0))[0]
        q = np.mean(matrices.transpose(0, 2, 1) @ p, 0)
        errors = matrices - p @ q.T
        results = mean(comm, gradients[comm.rank], compressor)
        tolerance = max(np.finfo(dtype).eps, 100 * np.finfo(wide).eps)
        np.testing.assert_allclose(results[0].reshape(30, 40), p @ q.T, rtol=0, atol=4 * tolerance)
        for n in (1, 2):  # sent as they are
            np.testing.assert_allclose(results[n], np.mean([x[n] for x in gradients], 0, 'f8'),
                                       rtol=0, atol=4 * tolerance)


def check_mixed_dtypes(comm, kind):
    gradients = [np.full(shape, 2 * comm.rank, dtype)
                 for dtype in DTYPES for shape in ((4,), (20, 30), (1,))]
    results = mean(comm, gradients, compression.get(kind))
    for result in results if kind != '2bit' else ():
        np.testing.assert_allclose(result, comm.size - 1, rtol=2**-10)


def main():
    for name in ('flat', 'naive'):
        comm = chainermn.create_communicator(name)
        check_topology(comm, [int(n) for n in sys.argv[1:]])
        for kind in KINDS:
            for dtype in DTYPES:
                for shapes in MODELS:
                    check_near_mean(comm, kind, shapes, dtype)
                    if kind != 'powersgd':
                        check_exact(comm, kind, shapes, dtype)
            check_mixed_dtypes(comm, kind)
        for dtype in DTYPES:
            check_feedback(comm, [(70, 50), (), (0, 2)], dtype)
            check_feedback(comm, [(2,)], dtype)
            check_power_sgd(comm, dtype)
        comm.finalize()
    sys.stdout.write(f'all right on {socket.gethostname()}\n')


if __name__ == '__main__':
    main()
