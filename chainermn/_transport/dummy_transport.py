"""A transport that packs and unpacks gradients but sends none, to measure the rest of a step."""
from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from chainermn._transport import packing
from chainermn._transport.array_list import ArrayList
from chainermn._transport.base import Codec
from chainermn._transport.mpi_transport import MpiTransport
from chainermn._transport.shared_memory.shared_memory_transport import SharedMemoryTransport
from chainermn._types import Array


class DummyTransport(SharedMemoryTransport):
    """Leaves each rank its own gradients. All other operations send data."""

    averages: ClassVar[bool] = False

    def mean(self, arrays: ArrayList, results: Sequence[Array] | None = None) -> None:
        for group, targets in self.groups(arrays, results):
            packing.unpack(packing.pack(group), targets)

    def mean_for_owners(self, arrays: ArrayList, owners: tuple[int, ...]) -> None:
        self.mean(arrays)

    def mean_compressed(self, arrays: ArrayList, results: Sequence[Array] | None, codec: Codec
                        ) -> None:
        MpiTransport.mean_compressed(self, arrays, results, codec)  # even with several nodes

    def _mean_encoded(self, codec: Codec, encoded: Array, size: int, dtype: np.dtype) -> Array:
        return codec.decompress(encoded, size, dtype)
