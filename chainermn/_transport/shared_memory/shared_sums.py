"""Sums host arrays in the shared memory of a node, chunk by chunk.

Packing all gradients into one buffer would move them out of the CPU cache and back. Instead, each
chunk passes through three phases while it is in the cache:

- pack: each rank copies its chunk into its input in the shared window;
- reduce: each rank sums its slice of the chunk over the ranks of the node, in the order of the
  ranks, into the output, which is also in the shared window;
- unpack: each rank copies the complete output back into its arrays.

At step k each rank unpacks chunk k - 2 LAG, packs chunk k and reduces chunk k - LAG; it begins once
all other ranks have finished step k - LAG. So with 2 LAG inputs and outputs, no rank reads data too
early or overwrites unread data, and a rank may be LAG - 1 steps late without blocking the others.

With several nodes, two more phases follow ``reduce``, each IN_FLIGHT steps later: ``combine`` sums
the slices of all nodes, and ``finish`` waits for the result; see
:mod:`chainermn._transport.shared_memory.between_nodes`. These phases need 2 IN_FLIGHT more outputs.
Each element is summed by exactly one rank, so the results are bitwise identical on all ranks.
"""
from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import cast

import numpy as np

from chainermn._process import runtime
from chainermn._process.mpi import MPI
from chainermn._transport import owned_parts
from chainermn._transport.array_list import ArrayList
from chainermn._transport.base import Codec, SlicedCompressor
from chainermn._transport.shared_memory import chunking
from chainermn._transport.shared_memory.chunks import Chunk
from chainermn._transport.shared_memory.plans import ChunkPlan, Planner
from chainermn._transport.shared_memory.window import Window, check_space, failures
from chainermn._transport.topology import Topology

LAG = 2
#: Number of steps for which the slices of a chunk, and then the sums, are in flight between nodes.
IN_FLIGHT = 2

#: Bytes of a chunk: small enough for the cache, but large enough to amortize the synchronization of
#: each step. Chunks are larger if ranks share cores or if there are several nodes.
CHUNK = 512 * 1024
CHUNK_IF_OVERSUBSCRIBED = 1024 * 1024
CHUNK_BETWEEN_NODES = 2 * 1024 * 1024
#: Memory for larger chunks is allocated only once a transfer is larger than SMALL_EXCHANGE.
SMALL_CHUNK = 64 * 1024
SMALL_EXCHANGE = 4 * SMALL_CHUNK

_INPUTS = 2 * LAG  # for the chunks between `pack` and `reduce`
_PLANS = 256  # maximum number of cached plans; a model has one plan per bucket


class _Interrupted(runtime.ProcessState):
    """Shared memories whose transfers were interrupted.

    They are kept forever, because MPI may still write messages that are in flight to their memory.
    """

    def __init__(self) -> None:
        self.memories: list[SharedMemory] = []


def chunk_size(topology: Topology, size: int = sys.maxsize) -> int:
    """Return the size of a chunk in bytes, which is the same on all ranks.

    Args:
        topology: The topology.
        size: Bytes of the largest transfer.
    """
    if size <= SMALL_EXCHANGE:
        return SMALL_CHUNK
    if topology.inter_size > 1:
        return CHUNK_BETWEEN_NODES
    return CHUNK_IF_OVERSUBSCRIBED if topology.is_oversubscribed else CHUNK


def create(mpi_comm: MPI.Comm, topology: Topology, chunk: int) -> SharedMemory | None:
    """Allocate shared memory. Collective: every rank calls it.

    Args:
        mpi_comm: Communicator of the ranks; nothing else may use it during a transfer.
        topology: The topology of this rank.
        chunk: Bytes of a chunk, a multiple of 64; the same on all ranks.

    Returns:
        The shared memory; or ``None`` on every rank, with a warning, if any rank cannot allocate
        it.
    """
    # Split only if necessary: with many ranks on few cores, each collective takes time.
    intra = cast(MPI.Intracomm, mpi_comm if topology.inter_size == 1 else mpi_comm.Split(
        topology.inter_rank, mpi_comm.rank))
    # The segment of the first rank also holds the outputs.
    inputs, outputs = _INPUTS * chunk, _outputs(topology) * chunk
    made: list[Window] = []

    def check() -> None:
        if intra.rank == 0:
            check_space(intra.size * inputs + outputs)

    def allocate() -> None:
        made.append(Window(intra, inputs + (outputs if intra.rank == 0 else 0),
                           f'rank {mpi_comm.rank}'))
        _write_first(made[0].segments, intra.rank, topology, chunk)

    for attempt in (check, allocate):
        if found := failures(mpi_comm, attempt):
            for window in made:
                window.free()
            if intra is not mpi_comm:
                intra.Free()
            warnings.warn(f'no shared memory on {found}; host arrays are summed by MPI, which '
                          'is slower', RuntimeWarning, stacklevel=2)
            return None
    return SharedMemory(mpi_comm, topology, intra, made[0], chunk)


class SharedMemory:
    """Sums and copies host arrays of the ranks of a communicator; see :func:`create`."""

    def __init__(self, mpi_comm: MPI.Comm, topology: Topology, intra: MPI.Comm, window: Window,
                 chunk: int) -> None:
        self._nodes = topology.nodes
        self._intra, self._is_split = intra, intra is not mpi_comm
        self._window = window
        self.chunk = chunk
        self._inter: MPI.Intracomm | None = None
        self._in_flight = 0
        if topology.inter_size > 1:
            self._in_flight = IN_FLIGHT
            reduces = intra.rank < topology.smallest_node
            inter = mpi_comm.Split(intra.rank if reduces else MPI.UNDEFINED, topology.inter_rank)
            self._inter = cast(MPI.Intracomm, inter) if reduces else None
        self._planner = Planner(
            mpi_comm.rank, topology,
            [segment[:_INPUTS * chunk].reshape(-1, chunk) for segment in window.segments],
            window.segments[0][_INPUTS * chunk:].reshape(-1, chunk), self._inter)
        self._step = 0
        self._plans: dict[tuple[object, ...], ChunkPlan] = {}
        self._failure: BaseException | None = None

    def sum(self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray] | None = None,
            scale: float | None = None) -> None:
        """Sum arrays over all ranks, element by element. Collective: every rank calls it.

        Args:
            arrays: Host arrays, all float16 (summed in float32 and rounded once), float32 or
                float64. The shapes are the same on all ranks.
            results: Arrays of the same shapes and dtype for the sums; ``arrays`` by default. The
                sums are bitwise identical on all ranks.
            scale: Multiplies the sums before rounding.

        Raises:
            RuntimeError: If another rank of the node failed or exited during the call.
        """
        self._reduce(self._plan(arrays, is_sum=True), arrays, results, scale)

    def sum_for_owners(self, arrays: Sequence[np.ndarray], owners: tuple[int, ...],
                       scale: float | None = None) -> None:
        """Sum arrays in place, each on its owner only. Collective: every rank calls it.

        Args:
            arrays: See :meth:`sum`. An array is undefined on all ranks except its owner.
            owners: The rank that needs each array. The arrays of an owner are adjacent.
            scale: Multiplies the sums before rounding.
        """
        if not owned_parts.fits(self._nodes, self.chunk // 8):
            self.sum(arrays, scale=scale)
        elif arrays:
            self._reduce(self._plan(arrays, owners, is_sum=True), arrays, None, scale)

    def _reduce(self, plan: ChunkPlan, arrays: Sequence[np.ndarray],
                results: Sequence[np.ndarray] | None, scale: float | None) -> None:
        factor = None if scale is None else plan.dtype.type(scale)
        is_in_place = results is None or results is arrays
        arrays = _ordered(arrays, plan.order)
        results = arrays if results is None else _ordered(results, plan.order)
        try:
            targets = sources = _flattened(results, plan.flat)
            if not is_in_place:
                sources = _flattened(arrays, plan.flat)
            # Do not warn about infinities and NaNs, because MPI sums do not either.
            with np.errstate(all='ignore'):
                self._run(plan.chunks, sources, targets, factor)
        except BaseException as error:
            self._fail(error)
            raise
        _copy_back(targets, results, plan.flat)

    def mean_encoded(self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray] | None,
                     codec: Codec, compressor: SlicedCompressor, name: str) -> None:
        """Average arrays over all ranks; only encoded arrays are sent between nodes.

        Collective: every rank calls it.

        Args:
            arrays: See :meth:`sum`.
            results: Arrays for the means; ``arrays`` by default.
            codec: Codec for flat arrays.
            compressor: The compressor of the codec.
            name: Name of the compressor's state for these arrays.
        """
        encoding = self._planner.encoding
        encoding.codec, encoding.compressor, encoding.name = codec, compressor, name
        self._reduce(self._plan(arrays, is_sum=True, is_encoded=True), arrays, results,
                     1 / len(self._nodes))

    def copy(self, arrays: Sequence[np.ndarray], owners: tuple[int, ...]) -> None:
        """Copy each array from its owner to all ranks. Collective: every rank calls it.

        Args:
            arrays: Host arrays. The shapes and dtypes are the same on all ranks.
            owners: The rank that has the data of each array. The arrays of an owner are adjacent.

        Raises:
            RuntimeError: If another rank of the node failed or exited during the call.
        """
        if not arrays:
            return
        plan = self._plan(arrays, owners)
        try:
            flat = _flattened(arrays, plan.flat)
            data = [array.view(np.uint8) for array in flat]
            self._run(plan.chunks, data, data)
        except BaseException as error:
            self._fail(error)
            raise
        _copy_back(flat, arrays, plan.flat)

    def set_passive_wait(self, passive: bool) -> None:
        """Select whether to sleep between polls while waiting for other ranks."""
        self._window.is_passive = self._planner.waiting.is_passive = passive

    def free(self) -> None:
        """Free the memory. Collective: every rank calls it, once."""
        if self._failure is None:
            self._plans.clear()
            del self._planner  # the plans and the planner refer to the memory
            self._window.free()
        if self._inter is not None:
            self._inter.Free()
        if self._is_split:
            self._intra.Free()

    def _run(self, chunks: list[Chunk], sources: list[np.ndarray], targets: list[np.ndarray],
             scale: np.generic | None = None) -> None:
        """Run the phases of all chunks."""
        if self._failure is not None:
            raise RuntimeError('an earlier operation of this communicator failed; create a new '
                               'communicator') from self._failure
        window, base, count = self._window, self._step, len(chunks)
        # With few chunks, there are no other chunks to work on between the phases of a chunk.
        lag, in_flight = min(LAG, count), min(self._in_flight, count)
        combined = lag + in_flight
        finished = combined + in_flight
        last = finished + lag
        for k in range(count + last):
            window.wait(base + k - lag + 1)
            if k >= last:
                chunks[k - last].unpack(targets, scale)
            if k < count:
                chunks[k].pack(sources)
            if in_flight and finished <= k < count + finished:
                chunks[k - finished].finish()
            if in_flight and combined <= k < count + combined:
                chunks[k - combined].combine(scale)
            if lag <= k < count + lag:
                chunks[k - lag].reduce(sources, targets, scale)
            window.publish(base + k + 1)
        self._step = base + count + last

    def _fail(self, error: BaseException) -> None:
        """Make the other ranks of the node raise an error."""
        if self._failure is None:
            self._failure = error
            if self._inter is not None:
                runtime.get(_Interrupted).memories.append(self)
            self._window.fail()

    def _plan(self, arrays: Sequence[np.ndarray], owners: tuple[int, ...] = (), *,
              is_sum: bool = False, is_encoded: bool = False) -> ChunkPlan:
        """Return the (cached) plan for arrays of these shapes, dtypes and owners."""
        if not isinstance(arrays, ArrayList):
            arrays = ArrayList.of(arrays)
        key = arrays.dtypes, arrays.shapes, owners, is_sum, is_encoded
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                del self._plans[next(iter(self._plans))]  # the oldest plan
            plan = self._plans[key] = self._planner.plan(arrays, owners, is_sum, is_encoded)
        return plan


def _outputs(topology: Topology) -> int:
    """Return the number of outputs: one for each chunk between ``reduce`` and ``unpack``."""
    return 2 * LAG + 2 * IN_FLIGHT * (topology.inter_size > 1)


def _ordered(arrays: Sequence[np.ndarray], order: Sequence[int] | None) -> Sequence[np.ndarray]:
    """Return arrays in the order of a plan."""
    return arrays if order is None else [arrays[n] for n in order]


def _flattened(arrays: Sequence[np.ndarray], numbers: Sequence[int]) -> list[np.ndarray]:
    """Return the arrays, with some of them flattened; arrays that are not C-ordered are copied."""
    flat = list(arrays)
    for number in numbers:
        flat[number] = arrays[number].ravel()
    return flat


def _copy_back(flat: Sequence[np.ndarray], arrays: Sequence[np.ndarray], numbers: Sequence[int]
               ) -> None:
    """Copy results back to the arrays that :func:`_flattened` had to copy."""
    for number in numbers:
        array = arrays[number]
        if not array.flags.c_contiguous:
            array[...] = flat[number].reshape(array.shape)


def _write_first(segments: Sequence[np.ndarray], rank: int, topology: Topology, chunk: int) -> None:
    """Write to this rank's memory, so that its pages are allocated near this rank's core."""
    segments[rank][:_INPUTS * chunk] = 0
    if rank < topology.smallest_node:
        begin, end = chunking.slices(chunk, topology.smallest_node)[rank]
        outputs = segments[0][_INPUTS * chunk:].reshape(_outputs(topology), chunk)
        outputs[:, begin:end] = 0
