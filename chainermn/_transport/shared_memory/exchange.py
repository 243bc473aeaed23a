"""Sums host arrays in the shared memory of a node, chunk by chunk.

Packing all gradients into one buffer would move them out of the CPU cache and back.  Instead, each
chunk passes three stages while it is in the cache:

- pack: each rank copies its chunk into its input in the shared window;
- reduce: each rank sums its slice of the chunk over the ranks of the node, in the order of the
  ranks, into the output, which is shared as well;
- unpack: each rank copies the complete output back into its arrays.

At step k each rank unpacks chunk k - 2 LAG, packs chunk k and reduces chunk k - LAG; it begins once
all other ranks have finished step k - LAG.  So with 2 LAG inputs and outputs no rank reads data too
early or overwrites unread data, and a rank may be LAG - 1 steps late without blocking others.

With several nodes, two more stages follow ``reduce``, each IN_FLIGHT steps later: ``combine`` sums
the slices of all nodes, and ``finish`` waits for the result; see
:mod:`chainermn._transport.shared_memory.between_nodes`.  That takes 2 IN_FLIGHT more outputs.  Each
element is summed by a single rank of all, so all ranks get the same bits.
"""
from __future__ import annotations

import errno
import itertools
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np

from chainermn._operations.ranks import group_ranks, ranks_text
from chainermn._process import runtime
from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers, owned_parts
from chainermn._transport.array_list import ArrayList
from chainermn._transport.base import Codec, SlicedCompressor
from chainermn._transport.shared_memory import chunking
from chainermn._transport.shared_memory.between_nodes import (
    NodeCopy,
    NodeExchange,
    NodeGather,
    NodeReduction,
    NodeSum,
    Waiting,
)
from chainermn._transport.shared_memory.chunking import ChunkPieces, OwnedSlice
from chainermn._transport.shared_memory.encoded_node_sum import EncodedNodeSum, Encoding
from chainermn._transport.shared_memory.stages import (
    Chunk,
    CopiedChunk,
    DirectChunk,
    PackedChunk,
    SentChunk,
)
from chainermn._transport.shared_memory.window import Window
from chainermn._transport.topology import Topology

LAG = 2
#: Steps for which the slices of a chunk, and then their sums, are in flight between nodes.
IN_FLIGHT = 2

#: Bytes of a chunk: small enough for the cache, large enough to amortize the synchronization of a
#: step; larger if ranks share cores or span nodes.
CHUNK = 512 * 1024
CHUNK_IF_CROWDED = 1024 * 1024
CHUNK_BETWEEN_NODES = 2 * 1024 * 1024
#: While no exchange is larger than a few of these, memory for larger chunks is not allocated.
SMALL_CHUNK = 64 * 1024
SMALL_EXCHANGE = 4 * SMALL_CHUNK

#: Ranks that are alone on their hosts send arrays of at least this part of a chunk by themselves.
SENT = 4

#: A chunk of more pieces than this is packed first, which costs a copy but no time per piece.
FEW = 8

_INPUTS = 2 * LAG  # for the chunks between `pack` and `reduce`
_PLANS = 256  # cached; a model has one per bucket


class _Interrupted(runtime.ProcessState):
    """Kept forever: messages in flight may still be written to their memory."""

    def __init__(self) -> None:
        self.memories: list[SharedMemory] = []


def chunk_size(topology: Topology, size: int = sys.maxsize) -> int:
    """Return the bytes of a chunk, which are the same on all ranks.

    Args:
        topology: The topology.
        size: Bytes of the largest exchange.
    """
    if size <= SMALL_EXCHANGE:
        return SMALL_CHUNK
    if topology.inter_size > 1:
        return CHUNK_BETWEEN_NODES
    return CHUNK_IF_CROWDED if topology.is_crowded else CHUNK


def create(mpi_comm: MPI.Comm, topology: Topology, chunk: int) -> SharedMemory | None:
    """Allocate shared memory.  Collective: every rank calls it.

    Args:
        mpi_comm: The ranks; nothing else may use it during an exchange.
        topology: The topology of this rank.
        chunk: Bytes of a chunk, a multiple of 64; the same on all ranks.

    Returns:
        The shared memory; or ``None`` on every rank, with a warning, if one rank cannot allocate
        it.
    """
    # With many ranks on few cores, each collective here takes time.
    intra = cast(MPI.Intracomm, mpi_comm if topology.inter_size == 1 else mpi_comm.Split(
        topology.inter_rank, mpi_comm.rank))
    inputs, outputs = _INPUTS * chunk, _outputs(topology) * chunk  # the first rank has the outputs
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
    """Sums and copies host arrays of the ranks of a communicator; made by :func:`create`."""

    def __init__(self, mpi_comm: MPI.Comm, topology: Topology, intra: MPI.Comm, window: Window,
                 chunk: int) -> None:
        self._rank, self._nodes = mpi_comm.rank, topology.nodes
        self._intra, self._is_split = intra, intra is not mpi_comm
        self._window = window
        self.chunk = chunk
        # The number of ranks that reduce on each node.
        self._slices = topology.smallest_node
        reduces = intra.rank < self._slices
        self._inter: MPI.Intracomm | None = None
        self._in_flight = 0
        self._size = mpi_comm.size
        self._waiting = Waiting()
        self._encoding = Encoding()
        if topology.inter_size > 1:
            self._in_flight = IN_FLIGHT
            inter = mpi_comm.Split(intra.rank if reduces else MPI.UNDEFINED, topology.inter_rank)
            self._inter = cast(MPI.Intracomm, inter) if reduces else None
        self._n_outputs = outputs = _outputs(topology)
        # The parts of other nodes, on ranks that reduce.  Parts may differ by an element.
        self._received = [] if self._inter is None else [
            np.empty(chunk + 8 * topology.inter_size, np.uint8) for _ in range(outputs)]
        self._inputs = [segment[:_INPUTS * chunk] for segment in window.segments]
        self._output = window.segments[0][_INPUTS * chunk:]
        self._step = 0
        self._plans: dict[tuple[object, ...], _Plan] = {}
        self._failure: BaseException | None = None

    def sum(self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray] | None = None,
            scale: float | None = None) -> None:
        """Sum arrays over all ranks, element by element.  Collective: every rank calls it.

        Args:
            arrays: Host arrays, all float16 (summed in float32 and rounded once), float32 or
                float64.  The shapes are equal on all ranks.
            results: Arrays of the same shapes and dtype for the sums, which are bitwise equal on
                all ranks; by default ``arrays``.
            scale: Multiplies the sums before rounding.

        Raises:
            RuntimeError: If another rank of the node failed or ended during the exchange.
        """
        self._reduce(self._plan(arrays, is_sum=True), arrays, results, scale)

    def sum_for_owners(self, arrays: Sequence[np.ndarray], owners: tuple[int, ...],
                       scale: float | None = None) -> None:
        """Sum arrays in place, each for its owner.  Collective: every rank calls it.

        Args:
            arrays: As for :meth:`sum`.  Values on other ranks are undefined.
            owners: The rank that needs each array.  Arrays of one owner are neighbors.
            scale: Multiplies the sums before rounding.
        """
        if not owned_parts.fits(self._nodes, self.chunk // 8):
            self.sum(arrays, scale=scale)
        elif arrays:
            self._reduce(self._plan(arrays, owners, is_sum=True), arrays, None, scale)

    def _reduce(self, plan: _Plan, arrays: Sequence[np.ndarray],
                results: Sequence[np.ndarray] | None, scale: float | None) -> None:
        factor = None if scale is None else plan.dtype.type(scale)
        is_in_place = results is None or results is arrays
        arrays = plan.ordered(arrays)
        results = arrays if results is None else plan.ordered(results)
        try:
            targets = sources = _flattened(results, plan.flat)
            if not is_in_place:
                sources = _flattened(arrays, plan.flat)
            # Infinities and NaNs pass silently, as in a sum by MPI.
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
            arrays: Like those of :meth:`sum`.
            results: Arrays for the means; by default ``arrays``.
            codec: Encodes flat arrays.
            compressor: Its compressor.
            name: The name of its state for these arrays.
        """
        encoding = self._encoding
        encoding.codec, encoding.compressor, encoding.name = codec, compressor, name
        self._reduce(self._plan(arrays, is_sum=True, is_encoded=True), arrays, results,
                     1 / self._size)

    def copy(self, arrays: Sequence[np.ndarray], owners: tuple[int, ...]) -> None:
        """Copy each array of its owner into that of all ranks.  Collective: every rank calls it.

        Args:
            arrays: Host arrays.  The shapes and dtypes are equal on all ranks.
            owners: The rank with the data of each array.  Arrays of one owner are neighbors.

        Raises:
            RuntimeError: If another rank of the node failed or ended during the exchange.
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
        self._window.is_passive = self._waiting.is_passive = passive

    def free(self) -> None:
        """Free the memory.  Collective: every rank calls it, once."""
        if self._failure is None:
            self._plans.clear()
        self._inputs, self._output = [], np.empty(0, np.uint8)
        if self._failure is None:
            self._window.free()
        if self._inter is not None:
            self._inter.Free()
        if self._is_split:
            self._intra.Free()

    def _run(self, chunks: list[Chunk], sources: list[np.ndarray], targets: list[np.ndarray],
             scale: np.generic | None = None) -> None:
        """Run the stages of all chunks."""
        if self._failure is not None:
            raise RuntimeError('an earlier exchange of these ranks failed') from self._failure
        window, base, count = self._window, self._step, len(chunks)
        # A single chunk has no others to work on between its stages.
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
              is_sum: bool = False, is_encoded: bool = False) -> _Plan:
        """Return the plan for arrays of these shapes, dtypes and owners, cached."""
        if not isinstance(arrays, ArrayList):
            arrays = ArrayList.of(arrays)
        key = arrays.dtypes, arrays.shapes, owners, is_sum, is_encoded
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                del self._plans[next(iter(self._plans))]  # the oldest
            plan = self._plans[key] = self._new_plan(arrays, owners, is_sum, is_encoded)
        return plan

    def _new_plan(self, arrays: ArrayList, owners: tuple[int, ...], is_sum: bool, is_encoded: bool
                  ) -> _Plan:
        if not is_sum:
            if len({*owners}) > 1 and owned_parts.fits(self._nodes, self.chunk):
                return self._plan_to_gather(arrays, owners)
            return self._plan_to_copy(arrays, owners)
        dtype = array_buffers.summed_in(arrays[0].dtype)
        if owners:
            return self._plan_for_owners(arrays.shapes, dtype, owners)
        if self._inter is not None and self._size == self._inter.size and not is_encoded and (
                dtype == arrays[0].dtype):
            return self._plan_to_send(arrays.shapes, dtype, self._inter)
        return self._plan_to_sum(arrays.shapes, dtype, is_encoded)

    def _plan_to_copy(self, arrays: Sequence[np.ndarray], owners: tuple[int, ...]) -> _Plan:
        """Create a plan that copies arrays as bytes; the owners of a chunk are on one node."""
        shapes = [(array.nbytes,) for array in arrays]
        nodes = [self._nodes[owner] for owner in owners]
        chunks: list[Chunk] = []
        for number, pieces in enumerate(chunking.cut(
                [array.nbytes for array in arrays], self.chunk,
                [i for i in range(1, len(nodes)) if nodes[i] != nodes[i - 1]])):
            output = self._slot(self._output, number % self._n_outputs, np.dtype(np.uint8))
            exchange = None
            if self._inter is not None and self._intra.rank == 0:
                exchange = NodeCopy(self._inter, output[:pieces[-1].end], self._waiting,
                                    nodes[pieces[0].array])
            chunks.append(CopiedChunk([
                (owner == self._rank, ChunkPieces([*run], shapes)) for owner, run
                in itertools.groupby(pieces, lambda piece: owners[piece.array])], output, exchange))
        return _Plan(chunks, range(len(arrays)), np.dtype(np.uint8))

    def _plan_to_gather(self, arrays: Sequence[np.ndarray], owners: tuple[int, ...]) -> _Plan:
        """Create a plan that copies arrays as bytes; each node sends its part of each chunk."""
        shapes, dtype = [(array.nbytes,) for array in arrays], np.dtype(np.uint8)
        chunks: list[Chunk] = []
        for number, slices in enumerate(self._owned_slices(
                [size for size, in shapes], owners, self.chunk)):
            output = self._slot(self._output, number % self._n_outputs, dtype)
            exchange = None
            if self._inter is not None:
                exchange = NodeGather(
                    self._inter, slices[self._intra.rank].parts(output), self._waiting)
            chunks.append(CopiedChunk(
                [(owners[run[0].array] == self._rank, ChunkPieces(run, shapes))
                 for each in slices for run in each.runs(owners)], output, exchange))
        return _Plan(chunks, range(len(arrays)), dtype)

    def _plan_for_owners(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype,
                         owners: tuple[int, ...]) -> _Plan:
        """Create a plan that sums arrays; each node receives the part of a chunk that it owns."""
        flat: set[int] = set()
        chunks: list[Chunk] = []
        for number, slices in enumerate(self._owned_slices(
                [*map(math.prod, shapes)], owners, self.chunk // dtype.itemsize)):
            inputs, rank, output = self._views(slices[-1].end, number, dtype)
            own: tuple[int, int] = output.size, output.size
            nodes: NodeExchange | None = None
            if rank < self._slices:
                mine = slices[rank]
                own = mine.begin, mine.end
                if self._inter is not None and mine.begin < mine.end:
                    received = self._received[number % self._n_outputs].view(dtype)
                    nodes = NodeReduction(self._inter, mine.parts(output), received, self._waiting)
            runs = [run for each in slices for run in each.runs(owners)]
            needed = [run for run in runs if owners[run[0].array] == self._rank]
            if sum(map(len, runs)) <= FEW + len(self._nodes):
                pieces = [*itertools.chain(*runs)]
                flat.update(piece.array for piece in pieces)
                chunks.append(DirectChunk(pieces, inputs, rank, output, own, nodes,
                                          needed=[*itertools.chain(*needed)]))
            else:
                packed = [ChunkPieces(run, shapes) for run in runs]
                flat.update(array for run in packed for array in run.flat)
                chunks.append(PackedChunk(packed, inputs, rank, output, own, nodes, [
                    ChunkPieces(run, shapes) for run in needed]))
        return _Plan(chunks, sorted(flat), dtype)

    def _owned_slices(self, sizes: Sequence[int], owners: tuple[int, ...], length: int
                      ) -> list[list[OwnedSlice]]:
        """Return the slices of all chunks of at most ``length`` elements."""
        return [chunking.owned_slices(parts, self._nodes, self._slices)
                for parts in owned_parts.dealt(tuple(sizes), owners, self._nodes, length)]

    def _plan_to_send(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype,
                      inter: MPI.Intracomm) -> _Plan:
        """Create a plan for ranks that are alone on their hosts: large arrays are not copied."""
        sizes = [*map(math.prod, shapes)]
        length = self.chunk // dtype.itemsize
        order = sorted(range(len(sizes)), key=lambda n: sizes[n] < length // SENT)
        count = sum(size >= length // SENT for size in sizes)
        chunks: list[Chunk] = [
            SentChunk(piece, inter, self._received[number % self._n_outputs].view(dtype),
                      self._waiting)
            for number, (piece,) in enumerate(chunking.cut(
                [sizes[n] for n in order[:count]], length, range(count)))]
        others = self._plan_to_sum([shapes[n] for n in order], dtype, False, count, len(chunks))
        return _Plan(chunks + others.chunks, [*range(count), *others.flat], dtype, order)

    def _plan_to_sum(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype, is_encoded: bool,
                     first: int = 0, base: int = 0) -> _Plan:
        """Create a plan that sums arrays, from one of them on, in chunks from that number on."""
        flat: set[int] = set()
        chunks: list[Chunk] = []
        sizes = [0] * first + [*map(math.prod, shapes[first:])]
        for number, pieces in enumerate(chunking.cut(sizes, self.chunk // dtype.itemsize), base):
            views = self._views(pieces[-1].end, number, dtype)
            own, nodes = self._own_slice(views[-1], number, is_encoded)
            if len(pieces) <= FEW:
                flat.update(piece.array for piece in pieces)
                chunks.append(DirectChunk(pieces, *views, own, nodes, is_encoded))
            else:
                run = ChunkPieces(pieces, shapes)
                flat.update(run.flat)
                chunks.append(PackedChunk([run], *views, own, nodes))
        return _Plan(chunks, sorted(flat), dtype)

    def _views(self, length: int, number: int, dtype: np.dtype
               ) -> tuple[list[np.ndarray], int, np.ndarray]:
        """Return the inputs of a chunk, the intra rank and the output."""
        output = self._slot(self._output, number % self._n_outputs, dtype)[:length]
        inputs = [self._slot(segment, number % _INPUTS, dtype)[:length]
                  for segment in self._inputs]
        return inputs, self._intra.rank, output

    def _own_slice(self, output: np.ndarray, number: int, is_encoded: bool
                   ) -> tuple[tuple[int, int], NodeExchange | None]:
        """Return the slice of a chunk that this rank reduces, and its exchange between nodes."""
        if self._intra.rank >= self._slices:
            return (output.size, output.size), None
        begin, end = chunking.slices(output.size, self._slices)[self._intra.rank]
        if self._inter is None or begin == end:
            return (begin, end), None
        data = output[begin:end]
        received = self._received[number % self._n_outputs].view(output.dtype)
        if is_encoded:
            return (begin, end), EncodedNodeSum(self._inter, data, received, self._waiting,
                                                self._encoding, f'{number}.{begin}-{end}')
        return (begin, end), NodeSum(self._inter, data, received, self._waiting)

    def _slot(self, segment: np.ndarray, slot: int, dtype: np.dtype) -> np.ndarray:
        return segment[slot * self.chunk:(slot + 1) * self.chunk].view(dtype)


def _outputs(topology: Topology) -> int:
    """One output for each chunk between ``reduce`` and ``unpack``."""
    return 2 * LAG + 2 * IN_FLIGHT * (topology.inter_size > 1)


class _Plan(NamedTuple):
    """The chunks of a list of arrays."""

    chunks: list[Chunk]
    flat: Sequence[int]  # indices of the arrays that must be flat
    dtype: np.dtype  # of the sums
    order: Sequence[int] | None = None  # in which these indices count the arrays

    def ordered(self, arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Return arrays in the order of the plan."""
        return arrays if self.order is None else [arrays[n] for n in self.order]


def _flattened(arrays: Sequence[np.ndarray], numbers: Sequence[int]) -> list[np.ndarray]:
    """Return the arrays, some of them flattened; those that are not C-ordered are copied."""
    flat = list(arrays)
    for number in numbers:
        flat[number] = arrays[number].ravel()
    return flat


def _copy_back(flat: Sequence[np.ndarray], arrays: Sequence[np.ndarray], numbers: Sequence[int]
               ) -> None:
    """Copy the results to the arrays that :func:`_flattened` has copied."""
    for number in numbers:
        array = arrays[number]
        if not array.flags.c_contiguous:
            array[...] = flat[number].reshape(array.shape)


def _write_first(segments: Sequence[np.ndarray], rank: int, topology: Topology, chunk: int) -> None:
    """Write to the memory of this rank: a page is allocated near the core that does so first."""
    segments[rank][:_INPUTS * chunk] = 0
    if rank < topology.smallest_node:
        begin, end = chunking.slices(chunk, topology.smallest_node)[rank]
        outputs = segments[0][_INPUTS * chunk:].reshape(_outputs(topology), chunk)
        outputs[:, begin:end] = 0


def check_space(size: int) -> None:
    """Raise if ``/dev/shm`` has too little space for the window.

    Otherwise the first write to the window would kill the process; and some MPI libraries do not
    raise on the other ranks if allocation fails on one.  Nothing is written, since the other ranks
    of the node wait for this one.
    """
    if os.path.isdir('/dev/shm'):
        with tempfile.TemporaryFile(dir='/dev/shm') as file:
            os.ftruncate(file.fileno(), size)  # raises if this process may not create such files
            space = os.fstatvfs(file.fileno())
        free = space.f_bavail * space.f_frsize
        if space.f_blocks and free < size:  # it may have no limit
            raise OSError(errno.ENOSPC, f'/dev/shm has {free} bytes left, and {size} are needed')


def failures(mpi_comm: MPI.Comm, attempt: Callable[[], object]) -> str:
    """Call a function on all ranks; return the errors by rank, the same text on all ranks."""
    failure = ''
    try:
        attempt()
    except Exception as error:
        failure = (error.Get_error_string() if isinstance(error, MPI.Exception) else str(error)
                   ) or type(error).__name__
    # Almost always there is none, and it takes less time to find that out.
    has_failed = np.array([bool(failure)])
    mpi_comm.Allreduce(MPI.IN_PLACE, has_failed, MPI.LOR)
    if not has_failed[0]:
        return ''
    groups = group_ranks(enumerate(mpi_comm.allgather(failure)))
    return '; '.join(f'{ranks_text(ranks)} ({text})' for text, ranks in groups.items() if text)
