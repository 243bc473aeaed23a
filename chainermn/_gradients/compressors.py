"""The compressors of chainermn.communicators.compression."""
from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeGuard

import chainer
import numpy as np

from chainermn._gradients import compressor_state, half_precision
from chainermn._gradients.compressor_state import Pieces
from chainermn._gradients.half_precision import CHUNK
from chainermn._gradients.power_sgd import PowerSGD
from chainermn._types import Array, Serializer

if TYPE_CHECKING:  # importing it at run time would import mpi4py
    from chainermn._transport.base import Compressor

_FLOAT32 = np.finfo(np.float32)

__all__ = ['Bf16', 'Fp16', 'PowerSGD', 'TwoBit', 'describe', 'get']


#: The types that :func:`get` accepts.
Compression: TypeAlias = 'Compressor | PowerSGD | Mapping[str, object] | str | None'


def get(compression: Compression) -> Compressor | PowerSGD | None:
    """Return a compressor by name, parameters or instance.

    Args:
        compression: ``None`` (no compression), ``'fp16'``, ``'bf16'``, ``'2bit'``, ``'powersgd'``,
            a dict such as ``{'type': '2bit', 'threshold': 0.5}``, or a compressor.

    Returns:
        A compressor, or ``None``. For a name or a dict, the compressor is new and has no state.

    Raises:
        TypeError: If ``compression`` has the wrong type, or the threshold is not a number.
        ValueError: If the type is unknown, or a parameter is unknown or out of range.

    Example:
        >>> chainermn.communicators.compression.get({'type': '2bit', 'threshold': 0.25})
        2bit threshold=0.25
    """
    if compression is None or isinstance(compression, PowerSGD) or _is_compressor(compression):
        return compression
    if isinstance(compression, str):
        compression = {'type': compression}
    if isinstance(compression, type) and (
            compression is PowerSGD or hasattr(compression, 'decompress')):
        raise TypeError(f'compression must be an instance, not the class {compression.__name__}. '
                        f'Pass an instance: {compression.__name__}().')
    if not isinstance(compression, dict):
        raise TypeError('compression must be None, the name of a type, a dict such as '
                        "{'type': '2bit', 'threshold': 0.5}, or an object with the methods "
                        f'compress and decompress, not {compression!r}')
    parameters = dict(compression)
    kind = parameters.pop('type', None)
    if kind is None:
        raise ValueError(f"compression has no 'type': {compression!r}. Add one, such as "
                         "{'type': '2bit'}.")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ValueError(f'unknown compression type {kind!r}; use one of '
                         + ', '.join(map(repr, _TYPES)))
    known = _PARAMETERS.get(kind, [])
    if unknown := sorted(set(map(str, parameters)) - set(known)):
        raise ValueError(f'compression of type {kind!r} has no parameter {", ".join(unknown)}'
                         + (f'; it has {", ".join(known)}' if known else ''))
    return _TYPES[kind](**parameters)


def describe(compressor: object) -> str:
    """Return the description of a compressor, which the ranks compare.

    Example:
        >>> from chainermn.communicators import compression
        >>> compression.describe(compression.TwoBit())
        '2bit threshold=0.5'
    """
    kind = type(compressor)
    has_repr = any('__repr__' in vars(base) for base in kind.__mro__[:-1])
    return repr(compressor) if has_repr else kind.__qualname__


class Fp16:
    """Half precision: 2 bytes per value.

    Values beyond 65504 become infinite, as in any float16 calculation. Dynamic loss scaling detects
    this.

    Example:
        >>> optimizer = chainermn.create_multi_node_optimizer(
        ...     chainer.optimizers.SGD(), comm, compression='fp16').setup(model)
    """

    #: Each value is encoded as one element, independently of the others.
    elementwise: ClassVar[bool] = True
    #: The dtype of the encoded elements.
    encoded_dtype: ClassVar[str] = 'float16'
    encoded_type: ClassVar[str] = 'float16'

    def compress(self, x: Array, key: Hashable = None) -> Array:
        """Round to the nearest float16.

        Example:
            >>> compressor = chainermn.communicators.compression.Fp16()
            >>> compressor.compress(np.array([1, 1e6], np.float32))
            array([ 1., inf], dtype=float16)
        """
        with np.errstate(over='ignore'):
            return half_precision.to_float16(x) if _is_float32(x) else x.astype(np.float16)

    def decompress(self, encoded: Array, size: int, dtype: np.dtype) -> Array:
        """Cast back, without rounding.

        Example:
            >>> compressor = chainermn.communicators.compression.Fp16()
            >>> encoded = compressor.compress(np.array([1, 0.1], np.float32))
            >>> compressor.decompress(encoded, 2, np.dtype('float32')).round(3)
            array([1. , 0.1], dtype=float32)
        """
        if type(encoded) is np.ndarray and dtype == np.float32:
            return half_precision.to_float32(encoded)
        return encoded.astype(dtype)

    def encoded_length(self, size: int) -> int:
        """Return ``size``.

        Example:
            >>> chainermn.communicators.compression.Fp16().encoded_length(100)
            100
        """
        return size

    def __repr__(self) -> str:
        return 'fp16'


class Bf16:
    """bfloat16: 2 bytes per value, with the range of float32 and 8 significant bits.

    A value is the upper half of a float32, rounded to nearest even. It is encoded as uint16,
    because NumPy has no bfloat16.

    Example:
        >>> optimizer = chainermn.create_multi_node_optimizer(
        ...     chainer.optimizers.SGD(), comm, compression='bf16').setup(model)
    """

    elementwise: ClassVar[bool] = True
    encoded_dtype: ClassVar[str] = 'bfloat16'
    encoded_type: ClassVar[str] = 'uint16'

    def compress(self, x: Array, key: Hashable = None) -> Array:
        """Round to the nearest bfloat16. NaNs are preserved.

        Example:
            >>> compressor = chainermn.communicators.compression.Bf16()
            >>> compressor.compress(np.array([1, 1e6], np.float32))
            array([16256, 18804], dtype=uint16)
        """
        if _is_float32(x):
            return half_precision.to_bfloat16(x)
        xp = chainer.backend.get_array_module(x)
        with np.errstate(over='ignore'):
            x = xp.ascontiguousarray(x, np.float32)
        bits = x.view(np.uint32)
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7fff)  # adding 0x7fff plus the lowest kept bit rounds ties to even
        rounded += bits
        rounded >>= np.uint32(16)
        # The payload of a NaN may be in the lower half only, or overflow when it is rounded.
        nan = (bits >> np.uint32(16)) | np.uint32(0x40)
        return xp.where(x == x, rounded, nan).astype(np.uint16)

    def decompress(self, encoded: Array, size: int, dtype: np.dtype) -> Array:
        """Cast back. Only values of dtype float16 are rounded.

        Example:
            >>> compressor = chainermn.communicators.compression.Bf16()
            >>> encoded = compressor.compress(np.array([1, 1e6], np.float32))
            >>> compressor.decompress(encoded, 2, np.dtype('float32'))
            array([1.00000e+00, 9.99424e+05], dtype=float32)
        """
        bits = encoded.astype(np.uint32)
        bits <<= np.uint32(16)
        with np.errstate(over='ignore'):
            return bits.view(np.float32).astype(dtype, copy=False)

    def encoded_length(self, size: int) -> int:
        """Return ``size``.

        Example:
            >>> chainermn.communicators.compression.Bf16().encoded_length(100)
            100
        """
        return size

    def __repr__(self) -> str:
        return 'bf16'


class TwoBit:
    """2 bits per value, 16 values in the space of one float32, with error feedback.

    The residual, the part of earlier values that was not sent, is added to each value. If the sum
    is ``threshold`` or more, ``threshold`` is sent; if it is ``-threshold`` or less,
    ``-threshold`` is sent; otherwise, 0 is sent. The rest is the new residual::

        value = x + residual
        sent = threshold * ((value >= threshold) - (value <= -threshold))
        residual = value - sent

    Over many steps, everything is sent, but at most ``threshold`` at a time. Choose a threshold
    about as large as the largest gradients, without the loss scale. Infinities and NaNs are sent as
    NaN and do not change the residual.

    Args:
        threshold: A positive number.

    Example:
        >>> optimizer = chainermn.create_multi_node_optimizer(
        ...     chainer.optimizers.SGD(), comm,
        ...     compression={'type': '2bit', 'threshold': 0.25}).setup(model)
    """

    encoded_type: ClassVar[str] = 'uint32'

    threshold: float
    #: The residuals by key, or by path if the key is :class:`Pieces`: flat arrays on the device of
    #: the gradients, in float64 for float64 gradients, otherwise in float32.
    residuals: dict[Hashable, Array]
    _buffers: dict[Pieces, _Buffer]  # buffers of residuals that are encoded together
    _before: dict[Hashable, Array]  # residuals as of the last commit, if they have changed

    def __init__(self, threshold: float = 0.5) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, numbers.Real):
            raise TypeError(f'threshold must be a positive number, not {threshold!r}')
        threshold = float(threshold)
        if not float(_FLOAT32.tiny) <= threshold <= float(_FLOAT32.max):
            raise ValueError(f'threshold must be a positive number, not {threshold!r}')
        self.threshold = threshold
        self.residuals, self._buffers, self._before = {}, {}, {}

    def compress(self, x: Array, key: Hashable = None) -> Array:
        """Return ``ceil(len(x) / 16)`` elements of dtype uint32, with two bits for each value.

        The first value is in the lowest bits. 0 stands for 0, 1 for ``threshold``, 2 for
        ``-threshold`` and 3 for NaN.

        If the length or dtype of ``x`` has changed for this key, its residual restarts at zero.
        If the key is :class:`Pieces`, each piece has its own residual, regardless of the pieces
        that are encoded together with it.

        Example:
            >>> compressor = chainermn.communicators.compression.TwoBit(threshold=0.5)
            >>> encoded = compressor.compress(np.array([0.7, 0.1, -0.6], np.float32))
            >>> compressor.residuals[None].round(2)  # added to the next gradients
            array([ 0.2,  0.1, -0.1], dtype=float32)
        """
        xp = chainer.backend.get_array_module(x)
        pieces = key if isinstance(key, Pieces) else Pieces([(key, x.size)])
        old = self._buffer(pieces, x)
        new = _Buffer(pieces, xp.empty_like(old.values) if old.spare is None else old.spare)
        encoded = xp.empty(self.encoded_length(x.size), np.uint32)
        chunk = CHUNK if xp is np else max(x.size, 1)
        for start in range(0, x.size, chunk):
            part = slice(start, start + chunk)
            codes = self._quantize(x[part], old.values[part], new.values[part])
            encoded[start // 16:-(-part.stop // 16)].view(np.uint8)[...] = _packed(codes)
        new.spare = old.values
        self._buffers[pieces] = new
        self._before.update(old.parts)
        self.residuals.update(new.parts)
        return encoded

    def _buffer(self, pieces: Pieces, x: Array) -> _Buffer:
        """Return the residuals of pieces in one flat array."""
        dtype = np.promote_types(x.dtype, np.float32)
        found, residuals = self._buffers.get(pieces), self.residuals
        if found is not None and found.is_like(x, dtype) and all(
                residuals.get(key) is part for key, part in found.parts.items()):
            return found
        # The residuals were not encoded together in the last all-reduce: they were loaded or rolled
        # back, or the pieces are different.
        self._buffers = {each: buffer for each, buffer in self._buffers.items()
                         if buffer.parts.keys().isdisjoint(dict(pieces))}
        device = chainer.backend.get_device_from_array(x)
        found = _Buffer(pieces, device.xp.zeros(x.size, dtype))
        for key, part in found.parts.items():
            residual = residuals.get(key)
            if residual is not None and residual.shape == part.shape and residual.dtype == dtype:
                part[...] = device.send(residual)
        return found

    def _quantize(self, x: Array, residual: Array, result: Array) -> Array:
        """Return the code of each value; write the next residual to ``result``."""
        xp = chainer.backend.get_array_module(x)
        value = residual + x
        above = (value >= self.threshold).view(np.int8)
        below = (value <= -self.threshold).view(np.int8)
        codes = above + below
        codes += below
        above -= below
        sent = above.astype(residual.dtype)
        sent *= residual.dtype.type(self.threshold)
        finite = xp.isfinite(value)
        if xp is np and finite.all():
            np.subtract(value, sent, out=result)
        else:
            result[...] = xp.where(finite, value - sent, residual)
            codes |= (~finite).view(np.int8) * np.int8(3)
        return codes.view(np.uint8)

    def decompress(self, encoded: Array, size: int, dtype: np.dtype) -> Array:
        """Return ``threshold``, ``-threshold``, 0 or NaN for each value.

        Example:
            >>> compressor = chainermn.communicators.compression.TwoBit(threshold=0.5)
            >>> encoded = compressor.compress(np.array([0.7, 0.1, -0.6], np.float32))
            >>> compressor.decompress(encoded, 3, np.dtype('float32'))
            array([ 0.5,  0. , -0.5], dtype=float32)
        """
        xp = chainer.backend.get_array_module(encoded)
        with np.errstate(over='ignore'):
            values = np.array([0, self.threshold, -self.threshold, np.nan]).astype(dtype)
        of_byte = xp.asarray(values[np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3])
        return of_byte.take(encoded.view(np.uint8), axis=0).reshape(-1)[:size]

    def encoded_length(self, size: int) -> int:
        """Return the number of uint32 elements for ``size`` values, 16 in each element.

        Example:
            >>> chainermn.communicators.compression.TwoBit().encoded_length(100)
            7
        """
        return -(-size // 16)

    def reset(self) -> None:
        """Discard all residuals.

        Example:
            >>> compressor = chainermn.communicators.compression.TwoBit()
            >>> encoded = compressor.compress(np.ones(3, np.float32))
            >>> compressor.reset()
            >>> compressor.residuals
            {}
        """
        self.residuals.clear()
        self.commit()

    def commit(self) -> None:
        """Make the changes to the residuals since the last commit permanent.

        Example:
            >>> chainermn.communicators.compression.TwoBit().commit()
        """
        self._before.clear()

    def rollback(self, paths: Collection[str] | None = None) -> None:
        """Undo the changes to the residuals since the last :meth:`commit`.

        Call it if the data that was sent since then is not used.

        Args:
            paths: The paths whose residuals to restore, or ``None`` for all.

        Example:
            >>> compressor = chainermn.communicators.compression.TwoBit(threshold=0.5)
            >>> encoded = compressor.compress(np.array([0.75], np.float32))
            >>> compressor.rollback()
            >>> compressor.residuals
            {None: array([0.], dtype=float32)}
        """
        for key in [*self._before] if paths is None else self._before.keys() & set(paths):
            self.residuals[key] = self._before.pop(key).copy()

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the residuals; see :meth:`chainer.Link.serialize`.

        If a snapshot was saved without compression, there are no residuals after loading it.
        """
        self.residuals = compressor_state.serialize(serializer, self.residuals, 'residual')
        self.commit()

    def __repr__(self) -> str:
        return f'2bit threshold={self.threshold!r}'


class _Buffer:
    """The residuals of pieces in one flat array."""

    def __init__(self, pieces: Pieces, values: Array) -> None:
        self.values = values
        self.parts: dict[Hashable, Array] = {}
        self.spare: Array | None = None  # memory for the next residuals
        end = 0
        for key, size in pieces:
            self.parts[key] = values[end:end + size]
            end += size

    def is_like(self, x: Array, dtype: np.dtype) -> bool:
        """Return whether the shape, the dtype and the device are suitable for an array."""
        return self.values.shape == x.shape and self.values.dtype == dtype and (
            chainer.backend.get_device_from_array(self.values)
            == chainer.backend.get_device_from_array(x))


_TYPES: dict[str, Callable[..., Compressor | PowerSGD]] = {
    'fp16': Fp16, 'bf16': Bf16, '2bit': TwoBit, 'powersgd': PowerSGD,
}
_PARAMETERS = {'2bit': ['threshold'], 'powersgd': ['rank', 'min_compression_rate']}


def _packed(codes: Array) -> Array:
    """Pack two-bit codes, four per byte, padded to a multiple of four bytes."""
    if missing := -codes.size % 16:
        codes = chainer.backend.get_array_module(codes).pad(codes, (0, missing))
    # Move each of four codes to its place in the highest byte.
    fours = codes.view(np.uint32) * np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)
    return fours.view(np.uint8)[3::4]


def _is_float32(x: Array) -> bool:
    return type(x) is np.ndarray and x.dtype == np.float32 and x.flags.c_contiguous


def _is_compressor(compression: object) -> TypeGuard[Compressor]:
    return not isinstance(compression, type) and all(
        callable(getattr(compression, method, None)) for method in ('compress', 'decompress'))
