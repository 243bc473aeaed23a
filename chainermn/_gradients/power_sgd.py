"""PowerSGD: gradients as products of low-rank factors, with error feedback."""
from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import chainer
import numpy as np

from chainermn._gradients import compressor_state
from chainermn._gradients.loss_scale import without_scale
from chainermn._types import Array, Serializer


class PowerSGD:
    """Low-rank compression: an all-reduce of two low-rank factors for each gradient.

    A gradient ``M`` of shape (n, m), or flattened to this shape, is approximated by ``P Q^T``,
    where ``P`` has shape (n, rank) and ``Q`` (m, rank)::

        M = gradient + error
        P = orthogonalized(mean of M Q)       Q is from the previous step
        Q = mean of M^T P
        error = M - P Q^T

    With each step, ``P`` and ``Q`` approach the leading singular vectors of the mean gradient. The
    part of a gradient that was not sent is added to the next gradient. Vectors, and matrices that
    would hardly become smaller, are sent uncompressed. Infinities and NaNs are sent, and they leave
    the error unchanged. The error excludes the loss scale, which may change.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", NeurIPS 2019.

    Args:
        rank: The rank of the approximation, a positive integer; usually 1 to 4.
        min_compression_rate: The smallest factor by which compression must shrink a matrix;
            otherwise, the matrix is sent uncompressed.

    Example:
        >>> optimizer = chainermn.create_multi_node_optimizer(
        ...     chainer.optimizers.SGD(), comm,
        ...     compression={'type': 'powersgd', 'rank': 2}).setup(model)
    """

    rank: int
    min_compression_rate: float
    #: ``{path}.error`` and ``{path}.q`` for each compressed gradient.
    state: dict[str, Array]
    _before: dict[str, Array]  # state as of the last commit, if it has changed

    def __init__(self, rank: int = 2, min_compression_rate: float = 2) -> None:
        if isinstance(rank, bool) or not isinstance(rank, numbers.Integral):
            raise TypeError(f'PowerSGD: rank (of the low-rank factors) must be a positive '
                            f'integer, not {rank!r}')
        if rank < 1:
            raise ValueError(f'PowerSGD: rank (of the low-rank factors) must be a positive '
                             f'integer, not {rank}')
        if isinstance(min_compression_rate, bool) or not isinstance(
                min_compression_rate, numbers.Real):
            raise TypeError(f'min_compression_rate must be a number, not {min_compression_rate!r}')
        if not 1 <= min_compression_rate < float('inf'):
            raise ValueError(
                f'min_compression_rate must be at least 1, not {min_compression_rate!r}')
        self.rank = int(rank)
        self.min_compression_rate = float(min_compression_rate)
        self.state, self._before = {}, {}

    def is_compressed(self, shape: tuple[int, ...]) -> bool:
        """Return whether a gradient of this shape is sent as two low-rank factors.

        Example:
            >>> compressor = chainermn.communicators.compression.PowerSGD(rank=2)
            >>> compressor.is_compressed((256, 512)), compressor.is_compressed((256,))
            (True, False)
        """
        if len(shape) < 2 or 0 in shape:
            return False
        n, size = shape[0], int(np.prod(shape))
        return size >= self.min_compression_rate * self.rank * (n + size // n)

    def mean(self, paths: Sequence[str], arrays: Sequence[Array], results: Sequence[Array],
             average: Callable[[Sequence[Array], Sequence[Array]], None],
             defer: Callable[[Exception], None], scale: float | None = None) -> None:
        """Average gradients. Collective: every rank calls it.

        Args:
            paths: The path of each gradient, which identifies its state.
            arrays: The gradients.
            results: Arrays for the means.
            average: Function that averages arrays over all ranks, into other arrays or in place.
            defer: Function that is called with an error, instead of raising it while other ranks
                wait for the data.
            scale: The loss scale of the gradients. The state does not depend on it.
        """
        compressed = [i for i, x in enumerate(arrays) if self.is_compressed(x.shape)]
        others = [i for i, x in enumerate(arrays) if not self.is_compressed(x.shape)]
        with np.errstate(all='ignore'):  # gradients may overflow
            matrices: list[_Matrix] = []
            try:
                matrices = [self._matrix(paths[i], arrays[i], results[i], scale)
                            for i in compressed]
                ps = [matrix.values @ self.state[f'{matrix.path}.q'] for matrix in matrices]
            except Exception as error:
                defer(error)
                ps = [self._zeros(arrays[i], len(arrays[i])) for i in compressed]
            average([*ps, *(arrays[i] for i in others)], [*ps, *(results[i] for i in others)])
            try:
                ps = [chainer.backend.get_array_module(p).linalg.qr(p)[0] for p in ps]
                qs = [matrix.values.T @ p for matrix, p in zip(matrices, ps, strict=True)]
            except Exception as error:
                defer(error)
                qs = [self._zeros(arrays[i], arrays[i].size // len(arrays[i])) for i in compressed]
            if qs:
                average(qs, qs)
            try:
                for matrix, p, q in zip(matrices, ps, qs, strict=True):
                    self._store(matrix, p, q, scale)
            except Exception as error:
                defer(error)

    def _zeros(self, x: Array, n: int) -> Array:
        """Return a factor of zeros for a gradient, to send after an error."""
        xp = chainer.backend.get_array_module(x)
        return xp.zeros((n, self.rank), np.promote_types(x.dtype, np.float32))

    def _matrix(self, path: str, x: Array, result: Array, scale: float | None) -> _Matrix:
        dtype = np.promote_types(x.dtype, np.float32)
        values = x.reshape(len(x), -1)
        if scale is not None:
            values = without_scale(values, scale)
        device = chainer.backend.get_device_from_array(x)
        error, q = self.state.get(f'{path}.error'), self.state.get(f'{path}.q')
        if error is None or q is None or error.shape != values.shape or error.dtype != dtype or (
                q.shape != (values.shape[1], self.rank)):
            # The same random numbers on all ranks.
            random = np.random.RandomState(values.shape[0] * 65537 % 2**32)
            q = random.standard_normal((values.shape[1], self.rank)).astype(dtype)
            error = np.zeros(values.shape, dtype)
        for name, array in (f'{path}.q', q), (f'{path}.error', error):
            self.state[name] = self._before[name] = device.send(array)
        return _Matrix(path, values + self.state[f'{path}.error'], result)

    def _store(self, matrix: _Matrix, p: Array, q: Array, scale: float | None) -> None:
        """Write the approximation to the result and update the state."""
        xp = chainer.backend.get_array_module(p)
        approximation = p @ q.T
        scaled = approximation if scale is None else approximation * p.dtype.type(scale)
        matrix.result[...] = scaled.reshape(matrix.result.shape)
        if xp.isfinite(approximation.sum()):  # the same on all ranks
            self.state[f'{matrix.path}.error'] = xp.subtract(
                matrix.values, approximation, out=matrix.values)
            self.state[f'{matrix.path}.q'] = q

    def reset(self) -> None:
        """Discard all state.

        Example:
            >>> compressor = chainermn.communicators.compression.PowerSGD()
            >>> compressor.reset()
            >>> compressor.state
            {}
        """
        self.state.clear()
        self.commit()

    def commit(self) -> None:
        """Make the changes to the state since the last commit permanent.

        Example:
            >>> chainermn.communicators.compression.PowerSGD().commit()
        """
        self._before.clear()

    def rollback(self, paths: Collection[str] | None = None) -> None:
        """Undo the changes to the state since the last :meth:`commit`.

        Call it if the data that was sent since then is not used.

        Args:
            paths: The paths whose state to restore, or ``None`` for all.

        Example:
            >>> chainermn.communicators.compression.PowerSGD().rollback()
        """
        for name in [*self._before]:
            if paths is None or name.rpartition('.')[0] in paths:
                self.state[name] = self._before.pop(name)

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the state; see :meth:`chainer.Link.serialize`."""
        self.state = compressor_state.serialize(serializer, self.state, 'state')
        self.commit()

    def __repr__(self) -> str:
        return f'powersgd rank={self.rank} min_compression_rate={self.min_compression_rate!r}'


class _Matrix(NamedTuple):
    """A gradient to be compressed."""

    path: str
    values: Array  # the gradient plus the error, of shape (n, m)
    result: Array
