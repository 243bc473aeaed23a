"""PowerSGD: gradients as products of thin matrices, with error feedback."""
from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import NamedTuple

import chainer
import numpy as np

from chainermn._gradients import compressor_state
from chainermn._transport.array_list import ArrayList
from chainermn._transport.base import Transport
from chainermn._types import Array, Serializer


class PowerSGD:
    """Averages each gradient as a matrix of low rank: an all-reduce of two thin matrices.

    A gradient ``M`` of shape (n, m), or (n, ...) flattened to that, is approximated by ``P Q^T``,
    where ``P`` has shape (n, rank) and ``Q`` (m, rank)::

        M = gradient + error
        P = orthogonalized(mean of M Q)       Q is that of the previous step
        Q = mean of M^T P
        error = M - P Q^T

    So with each step ``P`` and ``Q`` approach the largest singular vectors of the mean, and what
    was not sent is added to the next gradient.  Vectors, and matrices too small to gain, are sent
    as they are.  Infinities and NaNs are passed on, and leave the error unchanged.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", NeurIPS 2019.

    Args:
        rank: The rank of the approximation, a positive integer; usually 1 to 4.
        min_compression_rate: A matrix is compressed if this saves at least this factor.
    """

    rank: int
    min_compression_rate: float
    #: ``{key}.error`` and ``{key}.q`` for each compressed gradient.
    state: dict[str, Array]

    def __init__(self, rank: int = 2, min_compression_rate: float = 2) -> None:
        if isinstance(rank, bool) or not isinstance(rank, numbers.Integral):
            raise TypeError(f'rank must be a positive integer, not {rank!r}')
        if rank < 1:
            raise ValueError(f'rank must be a positive integer, not {rank}')
        if isinstance(min_compression_rate, bool) or not isinstance(
                min_compression_rate, numbers.Real):
            raise TypeError(f'min_compression_rate must be a number, not {min_compression_rate!r}')
        if not 1 <= min_compression_rate < float('inf'):
            raise ValueError(
                f'min_compression_rate must be at least 1, not {min_compression_rate!r}')
        self.rank = int(rank)
        self.min_compression_rate = float(min_compression_rate)
        self.state = {}

    def is_compressed(self, shape: tuple[int, ...]) -> bool:
        """Whether a gradient of this shape is sent as two thin matrices."""
        if len(shape) < 2 or 0 in shape:
            return False
        n, size = shape[0], int(np.prod(shape))
        return size >= self.min_compression_rate * self.rank * (n + size // n)

    def mean(self, transport: Transport, arrays: ArrayList, results: Sequence[Array] | None,
             name: str) -> None:
        """Averages gradients.  Collective: every rank calls it.

        Args:
            transport: Averages the thin matrices.
            arrays: Gradients.
            results: Arrays for the means; by default ``arrays``.
            name: The name of the state for these gradients.
        """
        targets = arrays if results is None else results
        matrices = [self._matrix(x, target, f'{name}.{i}')
                    for i, (x, target) in enumerate(zip(arrays, targets, strict=True))
                    if self.is_compressed(x.shape)]
        others = [i for i, x in enumerate(arrays) if not self.is_compressed(x.shape)]
        with np.errstate(all='ignore'):  # gradients may overflow
            ps = [matrix.values @ self.state[f'{matrix.key}.q'] for matrix in matrices]
            transport.mean(ArrayList.of([*ps, *(arrays[i] for i in others)]),
                           [*ps, *(targets[i] for i in others)])
            ps = [chainer.backend.get_array_module(p).linalg.qr(p)[0] for p in ps]
            qs = [matrix.values.T @ p for matrix, p in zip(matrices, ps, strict=True)]
            if qs:
                transport.mean(ArrayList.of(qs))
            for matrix, p, q in zip(matrices, ps, qs, strict=True):
                self._store(matrix, p, q)

    def _matrix(self, x: Array, target: Array, key: str) -> _Matrix:
        xp = chainer.backend.get_array_module(x)
        dtype = np.promote_types(x.dtype, np.float32)
        values = x.reshape(len(x), -1)
        error, q = self.state.get(f'{key}.error'), self.state.get(f'{key}.q')
        if error is None or q is None or error.shape != values.shape or error.dtype != dtype or (
                not isinstance(error, xp.ndarray)):
            # The same random numbers on all ranks.
            random = np.random.RandomState(values.shape[0] * 65537 % 2**32)
            q = xp.asarray(random.standard_normal((values.shape[1], self.rank)).astype(dtype))
            error = xp.zeros(values.shape, dtype)
            self.state[f'{key}.q'], self.state[f'{key}.error'] = q, error
        return _Matrix(key, values + error, target)

    def _store(self, matrix: _Matrix, p: Array, q: Array) -> None:
        """Writes the approximation to the target, and updates the state."""
        xp = chainer.backend.get_array_module(p)
        approximation = p @ q.T
        matrix.target[...] = approximation.reshape(matrix.target.shape)
        if xp.isfinite(approximation.sum()):  # equal on all ranks
            xp.subtract(matrix.values, approximation, out=self.state[f'{matrix.key}.error'])
            self.state[f'{matrix.key}.q'] = q

    def reset(self) -> None:
        """Drops all state."""
        self.state.clear()

    def serialize(self, serializer: Serializer) -> None:
        """Saves or loads the state; see :meth:`chainer.Link.serialize`."""
        self.state = compressor_state.serialize(serializer, self.state)

    def __repr__(self) -> str:
        return f'powersgd rank={self.rank} min_compression_rate={self.min_compression_rate!r}'


class _Matrix(NamedTuple):
    """A gradient to be compressed."""

    key: str
    values: Array  # the gradient plus the error, of shape (n, m)
    target: Array
