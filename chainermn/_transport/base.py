"""The interface of transports, which move data between ranks."""
from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from mpi4py import MPI

from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._transport.array_list import ArrayList
from chainermn._transport.topology import Topology
from chainermn._types import Array


@dataclasses.dataclass
class Group:
    """The ranks that a transport connects, and the configuration of their communicator."""

    #: For the transport; nothing else may use it at the same time.
    mpi_comm: MPI.Intracomm
    topology: Topology
    #: The flight record of the communicator, with its time limit.
    calls: weakref.ref[FlightRecord]
    #: Whether gradients on a device are packed by a single kernel.
    batched_copy: bool = False
    #: The dtype in which NCCL averages; ``None`` is that of Chainer's configuration.
    grad_dtype: np.dtype | None = None


class Compressor(Protocol):
    """See :mod:`chainermn.communicators.compression`."""

    def compress(self, x: Array, key: Hashable = None) -> Array:
        """Encode a flat array."""

    def decompress(self, encoded: Array, size: int, dtype: np.dtype) -> Array:
        """Decode a flat array of ``size`` elements of a dtype."""


@runtime_checkable
class SlicedCompressor(Compressor, Protocol):
    """A compressor that any part of an array may be encoded with, whose lengths are known."""

    #: The dtype of encoded arrays.
    encoded_type: ClassVar[str]

    def encoded_length(self, size: int) -> int:
        """Return the length of the encoded array of ``size`` values, in at most their memory."""


class Codec(Protocol):
    """A compressor for the arrays of one exchange."""

    compressor: Compressor
    #: Identifies the state of the compressor for these arrays.
    name: str

    def encode(self, buffers: Sequence[Array]) -> list[Array]:
        """Compresses flat arrays; the ranks get arrays of equal dtypes and lengths."""

    def compress(self, x: Array, key: Hashable, dtype: np.dtype | str, length: int) -> Array:
        """Encode a flat array in the middle of an exchange, in which other ranks wait for it.

        An error is raised on all ranks after the exchange.  Until then, zeros are sent instead.
        """

    def decompress(self, encoded: Array, size: int, dtype: np.dtype) -> Array:
        """Decode an array in the middle of an exchange, like :meth:`compress`."""


class Transport(Protocol):
    """Moves arrays between the ranks of a communicator, after the consistency check.

    :class:`MpiTransport` implements all methods.  Derive a custom transport from that class and
    override the methods it can do faster: often just :meth:`mean`.
    """

    #: Whether gradients are averaged over the ranks; otherwise debug mode checks nothing.
    averages: ClassVar[bool]
    #: Whether models must be on a device; see :meth:`requirements`.
    needs_device: ClassVar[bool]
    #: Whether a model may be on a device on some ranks and on the host on others.
    allows_mixed_devices: ClassVar[bool]

    def carries(self, on_device: bool) -> bool:
        """Whether the methods for single arrays accept arrays on a device, or on the host.

        MPI carries all other arrays, and arrays that are on a device on some ranks only.
        """

    def requirements(self, paths: Sequence[str], arrays: ArrayList, for_mean: bool
                     ) -> dict[str, str]:
        """Check the arrays of a model that must be on a device, before they are exchanged.

        Args:
            paths: The path of each array.
            arrays: Parameters or gradients.
            for_mean: Whether they will be averaged.

        Returns:
            Properties besides paths, dtypes and shapes that must be equal on all ranks, by name.

        Raises:
            TypeError, ValueError: If this transport cannot exchange one of the arrays.
        """

    def connect(self) -> None:
        """Allocates resources, which otherwise happens in the first exchange.

        Collective: every rank calls it.
        """

    def mean(self, arrays: ArrayList, results: Sequence[Array] | None = None) -> None:
        """Averages arrays over all ranks.  Collective: every rank calls it.

        Args:
            arrays: Floating-point arrays, of the same dtypes and shapes on all ranks.
            results: Arrays for the means; by default ``arrays``.  Otherwise ``arrays`` do not
                change.
        """

    def mean_shard(self, arrays: ArrayList, shard: Sequence[tuple[int, int]]) -> None:
        """Averages arrays in place, of which this rank only needs a part.

        Collective: every rank calls it, or :meth:`mean`.

        Args:
            arrays: As for :meth:`mean`.
            shard: Begin and end of the elements that this rank needs, for each array, in C order.
                The values of the others are undefined.
        """

    def mean_compressed(self, arrays: ArrayList, results: Sequence[Array] | None, codec: Codec
                        ) -> None:
        """Like :meth:`mean`, but only encoded arrays are sent.

        Collective: every rank calls it.
        """

    def bcast_arrays(self, arrays: ArrayList, root: int = 0) -> None:
        """Copy the arrays of the root into those of all ranks.

        Collective: every rank calls it.
        """

    def set_passive_wait(self, passive: bool) -> None:
        """Select how to wait for other ranks: passively, or polling continuously."""

    def free(self) -> None:
        """Frees all resources.  Collective: every rank calls it, once."""

    def bcast(self, x: Array | None, shape: tuple[int, ...], dtype: np.dtype, on_device: bool,
              root: int) -> Array:
        """Return the array of the root, of that shape and dtype; on the root ``x``."""

    def gather(self, x: Array, shapes: Sequence[tuple[int, ...]], root: int
               ) -> tuple[Array, ...] | None:
        """Return the arrays of all ranks on the root, ``None`` on the others."""

    def scatter(self, xs: Sequence[Array], shape: tuple[int, ...], dtype: np.dtype,
                on_device: bool, homogeneous: bool, root: int) -> Array:
        """Return the array of the root for this rank, of that shape and dtype.

        ``xs`` is empty on the other ranks.  ``homogeneous``: all arrays have the same shape.
        """

    def alltoall(self, xs: Sequence[Array], shapes: Sequence[tuple[int, ...]], homogeneous: bool
                 ) -> tuple[Array, ...]:
        """Return the array of each rank for this rank, of those shapes.

        ``homogeneous``: all arrays of all ranks have the same shape.
        """

    def allgather(self, x: Array, shapes: Sequence[tuple[int, ...]]) -> tuple[Array, ...]:
        """Return the arrays of all ranks, of those shapes."""

    def allreduce(self, x: Array, op: str, out: Array | None = None) -> Array:
        """Return the reduction of the arrays of all ranks.

        It is in ``out`` if that is a C-ordered host array of the right dtype: ``x`` itself, or
        an array that shares no memory with ``x``.
        """

    def sums(self, xs: ArrayList) -> list[Array] | None:
        """Return the sums of several arrays; ``None`` where packing them is faster."""

    def reduce(self, x: Array, op: str, root: int) -> Array | None:
        """Return the reduction of the arrays of all ranks on the root, ``None`` on the others."""

    def reduce_scatter(self, x: Array, op: str, sizes: Sequence[int]) -> Array:
        """Return this rank's part, of the given sizes, of the reduction of flat arrays."""


#: Makes a transport.  Collective: every rank calls it.
TransportType = Callable[[Group], Transport]
