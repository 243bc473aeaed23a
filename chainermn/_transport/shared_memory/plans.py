"""Plans how to sum or copy a list of arrays in chunks, and where each chunk is in shared memory."""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers, owned_parts
from chainermn._transport.array_list import ArrayList
from chainermn._transport.shared_memory import chunking
from chainermn._transport.shared_memory.between_nodes import (
    NodeCopy,
    NodeGather,
    NodeReduction,
    NodeSum,
    NodeTransfer,
    Waiting,
)
from chainermn._transport.shared_memory.chunking import ChunkPieces, OwnedSlice
from chainermn._transport.shared_memory.chunks import (
    Chunk,
    CopiedChunk,
    DirectChunk,
    PackedChunk,
    SentChunk,
)
from chainermn._transport.shared_memory.encoded_node_sum import EncodedNodeSum, Encoding
from chainermn._transport.topology import Topology

#: Ranks that are alone on their hosts send arrays of at least 1 / SENT of a chunk separately.
SENT = 4

#: Chunks with more pieces than this are packed first. That costs a copy, but no time per piece.
FEW = 8


class ChunkPlan(NamedTuple):
    """The chunks of a list of arrays."""

    chunks: list[Chunk]
    flat: Sequence[int]  # indices of the arrays that must be flat
    dtype: np.dtype  # dtype of the sums
    order: Sequence[int] | None = None  # order of the arrays to which all indices refer


class Planner:
    """Creates the plans of a rank.

    Args:
        rank: The rank.
        topology: The topology of the rank.
        inputs: For each rank of the node, memory for the inputs of several chunks, one per row.
        outputs: Memory for the outputs of several chunks, one per row.
        inter: Communicator of one rank per node; ``None`` if there is only one node or this rank
            reduces no slices.

    Attributes:
        waiting: Used to wait for messages between nodes.
        encoding: The compressor of these messages, if they are encoded.
    """

    def __init__(self, rank: int, topology: Topology, inputs: Sequence[np.ndarray],
                 outputs: np.ndarray, inter: MPI.Intracomm | None) -> None:
        self._rank, self._intra_rank, self._nodes = rank, topology.intra_rank, topology.nodes
        self._slices = topology.smallest_node  # the number of ranks that reduce on each node
        self._inputs, self._outputs, self._inter = inputs, outputs, inter
        self._chunk = outputs.shape[1]
        # Buffers for the parts of other nodes, whose sizes may differ by one element.
        self._received = [] if inter is None else [
            np.empty(self._chunk + 8 * inter.size, np.uint8) for _ in outputs]
        self.waiting, self.encoding = Waiting(), Encoding()

    def plan(self, arrays: ArrayList, owners: tuple[int, ...], is_sum: bool, is_encoded: bool
             ) -> ChunkPlan:
        """Create a plan for :meth:`SharedMemory.sum` or :meth:`~.copy`."""
        if not is_sum:
            if len({*owners}) > 1 and owned_parts.fits(self._nodes, self._chunk):
                return self._plan_to_gather(arrays, owners)
            return self._plan_to_copy(arrays, owners)
        dtype = array_buffers.summed_in(arrays[0].dtype)
        if owners:
            return self._plan_for_owners(arrays.shapes, dtype, owners)
        if self._inter is not None and len(self._nodes) == self._inter.size and not is_encoded and (
                dtype == arrays[0].dtype):
            return self._plan_to_send(arrays.shapes, dtype, self._inter)
        return self._plan_to_sum(arrays.shapes, dtype, is_encoded)

    def _plan_to_copy(self, arrays: Sequence[np.ndarray], owners: tuple[int, ...]) -> ChunkPlan:
        """Create a plan that copies arrays as bytes; all owners of a chunk are on one node."""
        shapes = [(array.nbytes,) for array in arrays]
        nodes = [self._nodes[owner] for owner in owners]
        chunks: list[Chunk] = []
        for number, pieces in enumerate(chunking.cut(
                [array.nbytes for array in arrays], self._chunk,
                [i for i in range(1, len(nodes)) if nodes[i] != nodes[i - 1]])):
            output = self._output(number, np.dtype(np.uint8))
            transfer = None
            if self._inter is not None and self._intra_rank == 0:
                transfer = NodeCopy(self._inter, output[:pieces[-1].end], self.waiting,
                                    nodes[pieces[0].array])
            chunks.append(CopiedChunk([
                (owner == self._rank, ChunkPieces([*run], shapes)) for owner, run
                in itertools.groupby(pieces, lambda piece: owners[piece.array])], output, transfer))
        return ChunkPlan(chunks, range(len(arrays)), np.dtype(np.uint8))

    def _plan_to_gather(self, arrays: Sequence[np.ndarray], owners: tuple[int, ...]) -> ChunkPlan:
        """Create a plan that copies arrays as bytes; each node sends its part of each chunk."""
        shapes, dtype = [(array.nbytes,) for array in arrays], np.dtype(np.uint8)
        chunks: list[Chunk] = []
        for number, slices in enumerate(self._owned_slices(
                [size for size, in shapes], owners, self._chunk)):
            output = self._output(number, dtype)
            transfer = None
            if self._inter is not None:
                transfer = NodeGather(
                    self._inter, slices[self._intra_rank].parts(output), self.waiting)
            chunks.append(CopiedChunk(
                [(owners[run[0].array] == self._rank, ChunkPieces(run, shapes))
                 for each in slices for run in each.runs(owners)], output, transfer))
        return ChunkPlan(chunks, range(len(arrays)), dtype)

    def _plan_for_owners(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype,
                         owners: tuple[int, ...]) -> ChunkPlan:
        """Create a plan that sums arrays; each node receives only the parts that its ranks own."""
        flat: set[int] = set()
        chunks: list[Chunk] = []
        for number, slices in enumerate(self._owned_slices(
                [*map(math.prod, shapes)], owners, self._chunk // dtype.itemsize)):
            inputs, rank, output = self._views(slices[-1].end, number, dtype)
            own: tuple[int, int] = output.size, output.size
            nodes: NodeTransfer | None = None
            if rank < self._slices:
                mine = slices[rank]
                own = mine.begin, mine.end
                if self._inter is not None and mine.begin < mine.end:
                    received = self._received[number % len(self._received)].view(dtype)
                    nodes = NodeReduction(self._inter, mine.parts(output), received, self.waiting)
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
        return ChunkPlan(chunks, sorted(flat), dtype)

    def _owned_slices(self, sizes: Sequence[int], owners: tuple[int, ...], length: int
                      ) -> list[list[OwnedSlice]]:
        """Return the slices of each chunk; a chunk has at most ``length`` elements."""
        return [chunking.owned_slices(parts, self._nodes, self._slices)
                for parts in owned_parts.assigned(tuple(sizes), owners, self._nodes, length)]

    def _plan_to_send(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype,
                      inter: MPI.Intracomm) -> ChunkPlan:
        """Create a plan for ranks that are alone on their hosts, without copying large arrays."""
        sizes = [*map(math.prod, shapes)]
        length = self._chunk // dtype.itemsize
        order = sorted(range(len(sizes)), key=lambda n: sizes[n] < length // SENT)
        count = sum(size >= length // SENT for size in sizes)
        chunks: list[Chunk] = [
            SentChunk(piece, inter, self._received[number % len(self._received)].view(dtype),
                      self.waiting)
            for number, (piece,) in enumerate(chunking.cut(
                [sizes[n] for n in order[:count]], length, range(count)))]
        others = self._plan_to_sum([shapes[n] for n in order], dtype, False, count, len(chunks))
        return ChunkPlan(chunks + others.chunks, [*range(count), *others.flat], dtype, order)

    def _plan_to_sum(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype, is_encoded: bool,
                     first: int = 0, base: int = 0) -> ChunkPlan:
        """Create a plan that sums arrays, starting with array ``first`` and chunk ``base``."""
        flat: set[int] = set()
        chunks: list[Chunk] = []
        sizes = [0] * first + [*map(math.prod, shapes[first:])]
        for number, pieces in enumerate(chunking.cut(sizes, self._chunk // dtype.itemsize), base):
            views = self._views(pieces[-1].end, number, dtype)
            own, nodes = self._own_slice(views[-1], number, is_encoded)
            if len(pieces) <= FEW:
                flat.update(piece.array for piece in pieces)
                chunks.append(DirectChunk(pieces, *views, own, nodes, is_encoded))
            else:
                run = ChunkPieces(pieces, shapes)
                flat.update(run.flat)
                chunks.append(PackedChunk([run], *views, own, nodes))
        return ChunkPlan(chunks, sorted(flat), dtype)

    def _views(self, length: int, number: int, dtype: np.dtype
               ) -> tuple[list[np.ndarray], int, np.ndarray]:
        """Return the inputs of a chunk, the intra rank and the output."""
        output = self._output(number, dtype)[:length]
        inputs = [slots[number % len(slots)].view(dtype)[:length] for slots in self._inputs]
        return inputs, self._intra_rank, output

    def _own_slice(self, output: np.ndarray, number: int, is_encoded: bool
                   ) -> tuple[tuple[int, int], NodeTransfer | None]:
        """Return the slice of a chunk that this rank reduces, and its transfer between nodes."""
        if self._intra_rank >= self._slices:
            return (output.size, output.size), None
        begin, end = chunking.slices(output.size, self._slices)[self._intra_rank]
        if self._inter is None or begin == end:
            return (begin, end), None
        data = output[begin:end]
        received = self._received[number % len(self._received)].view(output.dtype)
        if is_encoded:
            return (begin, end), EncodedNodeSum(self._inter, data, received, self.waiting,
                                                self.encoding, f'{number}.{begin}-{end}')
        return (begin, end), NodeSum(self._inter, data, received, self.waiting)

    def _output(self, number: int, dtype: np.dtype) -> np.ndarray:
        return self._outputs[number % len(self._outputs)].view(dtype)
