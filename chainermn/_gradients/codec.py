"""Compresses the gradients of one exchange, and checks the encoded arrays."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from chainermn import _signature
from chainermn._gradients import compressors
from chainermn._gradients.parameters import ParameterList
from chainermn._gradients.power_sgd import PowerSGD
from chainermn._transport import array_buffers
from chainermn._transport.array_list import ArrayList
from chainermn._transport.base import Compressor, Transport
from chainermn._transport.encoded_mean import is_elementwise
from chainermn._types import Array


class Codec:
    """Compresses the flat buffers of one exchange.

    Args:
        compressor: The compressor.
        paths: The paths of the gradients, which identify the state of the compressor.
        check: Compares the encoded arrays of all ranks before data is sent; ``None`` if this must
            not block.
    """

    def __init__(self, compressor: Compressor, paths: Sequence[str],
                 check: Callable[[Callable[[], dict[str, str]]], None] | None = None) -> None:
        self.compressor = compressor
        self.name = f'{_signature.digest(list(paths)):x}'
        self._check = check

    def encode(self, buffers: Sequence[Array]) -> list[Array]:
        """Compresses flat arrays.  Collective if there is a check: every rank calls it.

        Raises:
            ValueError: If the compressor returns arrays of a wrong shape; on all ranks, if dtypes
                or lengths differ between ranks.
        """
        encoded: list[Array] = []

        def details() -> dict[str, str]:
            for n, buffer in enumerate(buffers):
                encoded.append(self._encoded(buffer, f'{self.name}.{n}'))
            return {f'encoded {n}': f'{x.dtype} {x.shape}' for n, x in enumerate(encoded)}

        if self._check is None:
            details()
        else:
            self._check(details)
        return encoded

    def _encoded(self, buffer: Array, key: str) -> Array:
        encoded = array_buffers.checked(self.compressor.compress(buffer, key))
        if encoded.ndim != 1 or (
                is_elementwise(self.compressor) and encoded.shape != buffer.shape):
            raise ValueError(
                f'compressor {compressors.describe(self.compressor)} returned shape '
                f'{encoded.shape} for {buffer.shape}; return a flat array, of the same length if '
                'the compressor is elementwise')
        return encoded


def average(transport: Transport, gradients: ParameterList, results: Sequence[Array] | None,
            compressor: Compressor | PowerSGD,
            new_codec: Callable[[ParameterList, Compressor], Codec]) -> None:
    """Averages compressed gradients.  Collective: every rank calls it.

    Args:
        transport: Moves the data.
        gradients: Gradients, the same ones on all ranks.
        results: Arrays for the means; by default ``gradients``.
        compressor: The compressor.
        new_codec: Creates the codec of a compressor that encodes flat arrays.
    """
    if isinstance(compressor, PowerSGD):
        def mean(arrays: Sequence[Array], means: Sequence[Array]) -> None:
            transport.mean(ArrayList.of(arrays), means)

        compressor.mean(gradients.paths, gradients, gradients if results is None else results, mean)
    else:
        transport.mean_compressed(gradients, results, new_codec(gradients, compressor))
