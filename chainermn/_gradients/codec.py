"""Compresses the gradients of one all-reduce and checks the encoded arrays."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import cast

import chainer
import numpy as np

from chainermn._gradients import compressors
from chainermn._gradients.compressor_state import Pieces
from chainermn._gradients.loss_scale import without_scale
from chainermn._gradients.parameters import ParameterList
from chainermn._gradients.power_sgd import PowerSGD
from chainermn._operations import call_signature
from chainermn._transport import array_buffers
from chainermn._transport.array_list import ArrayList
from chainermn._transport.base import Compressor
from chainermn._transport.encoded_mean import is_elementwise
from chainermn._transport.mpi_transport import MpiTransport
from chainermn._types import Array

#: Compares the details that a function returns between ranks: ``check(details, consequence)``. If
#: the function raises an error, all ranks raise it; the message states the consequence.
Check = Callable[[Callable[[], dict[str, str]], str], None]
#: Creates the codec for one all-reduce, given the gradients, the compressor and the loss scale.
NewCodec = Callable[[ParameterList, 'Compressor | PowerSGD', 'float | None'], 'GradientCodec']


class GradientCodec:
    """Compresses the flat buffers of one all-reduce.

    Errors are deferred until :meth:`finish`, because other ranks are waiting for the data.

    The loss scale may change at each step. Therefore, a compressor with state gets the gradients
    without the scale, in float32 or float64, and the codec multiplies the decoded gradients by it.
    Other compressors get scaled gradients, because the scale keeps small gradients in the range of
    float16.

    Args:
        compressor: The compressor. For :class:`PowerSGD`, the codec only defers its errors.
        gradients: The gradients. Their paths identify the state of the compressor.
        check: Function that compares the encoded arrays of all ranks before data is sent, and
            raises errors on all ranks; ``None`` if the codec must not block.
        scale: The loss scale of the gradients.
    """

    def __init__(self, compressor: Compressor | PowerSGD, gradients: ParameterList,
                 check: Check | None = None, scale: float | None = None) -> None:
        self.compressor = cast(Compressor, compressor)
        self.name = f'{call_signature.digest(list(gradients.paths)):x}'
        self.scale = scale if has_state(compressor) else None
        self._gradients: ParameterList | None = gradients  # until they are encoded
        self._check = check
        self._error: Exception | None = None  # the first one

    def encode(self, buffers: Sequence[Array], groups: Sequence[Sequence[Array]]) -> list[Array]:
        """Compress flat arrays. Collective if there is a check: every rank calls it.

        Args:
            buffers: The arrays.
            groups: The gradients in each array.

        Raises:
            ValueError: If the compressor returns arrays of the wrong shape. Also on all ranks if
                dtypes or lengths differ between ranks.
        """
        encoded: list[Array] = []
        paths: dict[int, list[str]] = {}  # several for one array if parameters share it
        assert self._gradients is not None
        for path, x in zip(self._gradients.paths, self._gradients, strict=True):
            paths.setdefault(id(x), []).append(path)

        def details() -> dict[str, str]:
            for buffer, group in zip(buffers, groups, strict=True):
                encoded.append(self._encoded(buffer, Pieces(
                    (paths[id(x)].pop(0), x.size) for x in group)))
            return {f'encoded {n}': f'{x.dtype} {x.shape}' for n, x in enumerate(encoded)}

        if self._check is None:
            details()
        else:
            self._check(details, 'no data was sent')
        return encoded

    def compress(self, x: Array, key: Hashable, dtype: np.dtype | str, length: int) -> Array:
        try:
            encoded = self._compress(x, key)
            if encoded.dtype == dtype and encoded.shape == (length,):
                return chainer.backend.get_array_module(encoded).ascontiguousarray(encoded)
            raise ValueError(
                f'compressor {compressors.describe(self.compressor)}: compress returned an array '
                f'of dtype {encoded.dtype} and shape {encoded.shape} for {x.size} values, but it '
                f'must return dtype {dtype} and shape ({length},)')
        except Exception as error:
            self.defer(error)
            return chainer.backend.get_array_module(x).zeros(length, dtype)

    def decompress(self, encoded: Array, size: int, dtype: np.dtype) -> Array:
        try:
            x = self._decompress(encoded, size, dtype)
            if x.shape == (size,) and np.can_cast(x.dtype, dtype, 'same_kind'):
                return x
            raise ValueError(
                f'compressor {compressors.describe(self.compressor)}: decompress returned an array '
                f'of dtype {x.dtype} and shape {x.shape}, but it must return dtype '
                f'{np.dtype(dtype)} and shape ({size},)')
        except Exception as error:
            self.defer(error)
            return chainer.backend.get_array_module(encoded).zeros(size, dtype)

    def defer(self, error: Exception) -> None:
        """Defer an error until :meth:`finish`."""
        self._error = self._error or error

    def finish(self) -> None:
        """Raise the first deferred error. Collective if there is a check: every rank calls it."""
        self._gradients = None  # free the gradients, even if a plan still refers to this codec

        def details() -> dict[str, str]:
            if self._error is not None:
                raise self._error
            return {}

        if self._check is None:
            details()
        else:
            self._check(details, 'the gradients are invalid')

    def _encoded(self, buffer: Array, key: Pieces) -> Array:
        encoded = array_buffers.checked(self._compress(buffer, key))
        if encoded.ndim != 1 or (
                is_elementwise(self.compressor) and encoded.shape != buffer.shape):
            raise ValueError(
                f'compressor {compressors.describe(self.compressor)}: compress returned an array '
                f'of shape {encoded.shape} for an array of shape {buffer.shape}. It must return a '
                'flat array; if the compressor is elementwise, of the same length.')
        return encoded

    def _compress(self, x: Array, key: Hashable) -> Array:
        """Encode gradients without their loss scale."""
        return self.compressor.compress(
            x if self.scale is None else without_scale(x, self.scale), key)

    def _decompress(self, encoded: Array, size: int, dtype: np.dtype) -> Array:
        """Decode gradients and multiply them by the loss scale."""
        if self.scale is None:
            return self.compressor.decompress(encoded, size, dtype)
        x = self.compressor.decompress(encoded, size, np.promote_types(dtype, np.float32))
        with np.errstate(over='ignore'):
            return (x * x.dtype.type(self.scale)).astype(dtype, copy=False)


def has_state(compressor: object) -> bool:
    """Return whether a compressor has state, such as gradients that it has not sent yet."""
    return hasattr(compressor, 'reset')


def average(transport: MpiTransport, gradients: ParameterList, results: Sequence[Array] | None,
            compressor: Compressor | PowerSGD,
            new_codec: NewCodec, scale: float | None) -> None:
    """Average compressed gradients. Collective: every rank calls it.

    Args:
        transport: The transport that moves the data.
        gradients: The gradients of the same parameters on all ranks.
        results: Arrays for the means, or ``None`` for ``gradients`` themselves.
        compressor: The compressor.
        new_codec: Function that creates the codec of an all-reduce.
        scale: The loss scale of the gradients.
    """
    codec = new_codec(gradients, compressor, scale)
    if isinstance(compressor, PowerSGD):
        def mean(arrays: Sequence[Array], means: Sequence[Array]) -> None:
            transport.mean(ArrayList.of(arrays), means)

        compressor.mean(gradients.paths, gradients, gradients if results is None else results, mean,
                        codec.defer, codec.scale)
    else:
        transport.mean_compressed(gradients, results, codec)
    codec.finish()
