"""The inputs of a transport: the ranks that it connects, compressors and codecs."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._process.mpi import MPI
from chainermn._transport.topology import Topology
from chainermn._types import Array

_T = TypeVar('_T')


class Prepare(Protocol):
    """A function that prepares a data transfer. Collective: every rank calls it."""

    def __call__(self, nbytes: int | None, prepare: Callable[[], _T], /) -> _T:
        """Return the result of a function that allocates and packs; raise its error on all ranks.

        Args:
            nbytes: The size of the transfer, the same on all ranks; ``None`` if not all ranks know
                it.
            prepare: The function. It must not communicate.
        """


def on_this_rank(nbytes: int | None, prepare: Callable[[], _T], /) -> _T:
    """Call ``prepare``. No other rank waits, so its error is raised only on this rank."""
    return prepare()


class Group:
    """The ranks that a transport connects, and the configuration of their communicator.

    Args:
        mpi_comm: The communicator for the transport's collectives. Messages of user code also use
            it.
        tagged_comm: The communicator for the transport's messages, which have the tag
            ``tags.reserved().arrays``.
        topology: The topology of this rank.
        record: The flight record of the communicator, with its time limit.
        batched_copy: Whether gradients on a device are packed by a single kernel.
        grad_dtype: The dtype in which NCCL averages; ``None`` for the dtype in Chainer's
            configuration.
        prepared: Function that prepares a data transfer. If it fails on a rank, all ranks raise the
            error.
    """

    # Do not use a dataclass: generating its methods takes as long as importing a module.
    def __init__(self, mpi_comm: MPI.Intracomm, tagged_comm: MPI.Intracomm, topology: Topology,
                 record: weakref.ref[FlightRecord], batched_copy: bool = False,
                 grad_dtype: np.dtype | None = None, prepared: Prepare = on_this_rank) -> None:
        self.mpi_comm = mpi_comm
        self.tagged_comm = tagged_comm
        self.topology = topology
        self.record = record
        self.batched_copy = batched_copy
        self.grad_dtype = grad_dtype
        self.prepared = prepared


class Compressor(Protocol):
    """See :mod:`chainermn.communicators.compression`.

    Example:
        >>> class Sign:
        ...     def compress(self, x, key=None):
        ...         return np.signbit(x)
        ...     def decompress(self, encoded, size, dtype):
        ...         return np.where(encoded, -1, 1).astype(dtype)
        >>> optimizer = chainermn.create_multi_node_optimizer(
        ...     chainer.optimizers.SGD(), comm, compression=Sign()).setup(model)
        >>> for _ in range(2):
        ...     optimizer.update(model, *batch)
    """

    def compress(self, x: Array, key: Hashable, /) -> Array:
        """Encode a flat array.

        Example:
            >>> compressor = chainermn.communicators.compression.Fp16()
            >>> compressor.compress(np.ones(2, np.float32), '/W')
            array([1., 1.], dtype=float16)
        """

    def decompress(self, encoded: Array, size: int, dtype: np.dtype, /) -> Array:
        """Decode a flat array of ``size`` elements of a dtype.

        Example:
            >>> compressor = chainermn.communicators.compression.Fp16()
            >>> compressor.decompress(np.ones(2, np.float16), 2, np.dtype('float32'))
            array([1., 1.], dtype=float32)
        """


@runtime_checkable
class SlicedCompressor(Compressor, Protocol):
    """A compressor that can encode any slice, with a known encoded length."""

    #: The dtype of encoded arrays.
    encoded_type: ClassVar[str]

    def encoded_length(self, size: int) -> int:
        """Return the length of the encoded array of ``size`` values.

        The encoded array must not need more memory than the values.
        """


class Codec(Protocol):
    """A compressor for the arrays of one all-reduce."""

    compressor: Compressor
    #: Identifies the state of the compressor for these arrays.
    name: str

    def encode(self, buffers: Sequence[Array], groups: Sequence[Sequence[Array]]) -> list[Array]:
        """Compress flat arrays; their dtypes and lengths are the same on all ranks.

        Args:
            buffers: The arrays.
            groups: The gradients in each array.
        """

    def compress(self, x: Array, key: Hashable, dtype: np.dtype | str, length: int) -> Array:
        """Encode a flat array in the middle of an all-reduce, while other ranks wait for it.

        If there is an error, zeros are sent instead, and all ranks raise the error at the end.
        """

    def decompress(self, encoded: Array, size: int, dtype: np.dtype) -> Array:
        """Decode an array in the middle of an all-reduce, like :meth:`compress`."""
