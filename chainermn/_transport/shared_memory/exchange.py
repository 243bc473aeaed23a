"""Host arrays are summed in memory that the ranks of a node share, chunk by chunk.

Packing all gradients into one buffer would move them out of the processor's cache and back.  So
they are taken chunk by chunk, and each chunk passes three stages while it is in the cache:

- pack: each rank copies its chunk into its input in the shared window;
- reduce: each rank sums its slice of the chunk over the ranks of the node, in the order of the
  ranks, into the output, which is shared as well; then the slices of the nodes are summed by MPI;
- unpack: each rank copies the whole output to where the chunk belongs.

At step k each rank unpacks chunk k - 2 LAG, packs chunk k and reduces chunk k - LAG; it begins
once all others have ended step k - LAG.  So with 2 LAG inputs and outputs no rank reads what is
not yet there, or overwrites what is still to be read, and a rank may be LAG - 1 steps late without
being waited for.  As a single rank sums an element (of a node), all ranks get the same bits.
"""
from __future__ import annotations

import contextlib
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from chainermn._ranks import ranks_text
from chainermn._transport import array_buffers, packing
from chainermn._transport.shared_memory import chunking
from chainermn._transport.shared_memory.chunking import Piece, Run
from chainermn._transport.shared_memory.stages import Copied, FewPieces, ManyPieces
from chainermn._transport.shared_memory.window import Window
from chainermn._transport.topology import Topology, cores

LAG = 2

#: Bytes of a chunk: much less than a cache, much more than what a step costs beside the copying;
#: larger where ranks wait for a core, or for another node.
CHUNK = 512 * 1024
CHUNK_IF_CROWDED = 1024 * 1024
CHUNK_BETWEEN_NODES = 2 * 1024 * 1024

#: A chunk of more pieces than this is reduced as one, which costs a copy but no time per piece.
FEW = 8

_SLOTS = 2 * LAG
_PLANS = 256  # to remember; a model has one for each bucket


def create(mpi_comm: Any, topology: Topology, chunk: int | None = None) -> SharedMemory | None:
    """Makes shared memory.  Collective: every rank calls it.

    Args:
        mpi_comm: The ranks; nothing else may be going on there while they exchange arrays.
        topology: Where this rank is.
        chunk: Bytes of a chunk, a multiple of 64; the same on all ranks.

    Returns:
        The shared memory; or ``None`` on every rank, with a warning, if one cannot have it.
    """
    said = mpi_comm.allgather((topology, cores()))
    if chunk is None:
        chunk = CHUNK
        for node in range(topology.inter_size):
            of_node = [theirs for place, theirs in said if place.inter_rank == node]
            if len(set().union(*of_node)) < len(of_node):
                chunk = CHUNK_IF_CROWDED
        if topology.inter_size > 1:
            chunk = CHUNK_BETWEEN_NODES
    intra = mpi_comm.Split(topology.inter_rank, mpi_comm.rank)
    segment = _SLOTS * chunk  # the inputs of a rank; or the outputs, beside those of its first one
    made: list[Window] = []

    def look_for_room() -> None:
        if intra.rank == 0:
            _check_room((intra.size + 1) * segment)

    def allocate() -> None:
        made.append(Window(intra, segment * (2 if intra.rank == 0 else 1),
                           f'rank {mpi_comm.rank}'))

    for attempt in (look_for_room, allocate):
        failures = _failures(mpi_comm, attempt)
        if failures:
            for window in made:
                window.free()
            intra.Free()
            warnings.warn(f'no shared memory on {failures}; arrays on the host are summed by MPI, '
                          'which takes longer', RuntimeWarning, stacklevel=2)
            return None
    return SharedMemory(mpi_comm, topology, intra, made[0], chunk,
                        slices=min(place.intra_size for place, _ in said))


class SharedMemory:
    """Sums and copies host arrays of the ranks of a communicator; made by :func:`create`."""

    def __init__(self, mpi_comm: Any, topology: Topology, intra: Any, window: Window, chunk: int,
                 slices: int) -> None:
        self._intra = intra
        self._window = window
        self._chunk = chunk
        # How many ranks of each node reduce: as many as the smallest node has.
        self._slices = slices
        reduces = intra.rank < slices
        self._inter = None
        if topology.inter_size > 1:
            inter = mpi_comm.Split(intra.rank if reduces else MPI.UNDEFINED, mpi_comm.rank)
            self._inter = inter if reduces else None
        size = _SLOTS * chunk
        self._inputs = [segment[:size] for segment in window.segments]
        self._output = window.segments[0][size:]
        # Who writes to a page of memory first gets it near its core.
        self._inputs[intra.rank][:] = 0
        if reduces:
            begin, end = chunking.slices(chunk, slices)[intra.rank]
            self._output.reshape(_SLOTS, chunk)[:, begin:end] = 0
        self._step = 0
        self._plans: dict[Any, _Plan] = {}
        self._failure: BaseException | None = None
        intra.Barrier()

    def sum(self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray] | None = None,
            scale: float | None = None) -> None:
        """Sums arrays over all ranks, element by element.  Collective: every rank calls it.

        Args:
            arrays: Host arrays, all of one dtype: float16, which is summed in float32 and rounded
                once, float32 or float64.  The shapes are the same on all ranks.
            results: Arrays of the same shapes and dtype for the sums, which are the same bits on
                all ranks; by default ``arrays``.
            scale: The sums are multiplied by it, before they are rounded.

        Raises:
            RuntimeError: If another rank of the node failed or ended in the middle.
        """
        wide = array_buffers.summed_in(arrays[0].dtype)
        factor = None if scale is None else wide.type(scale)
        plan = self._plan(self._summed, arrays, wide)
        with _flat(arrays if results is None else results, plan.flat) as targets:
            sources = targets
            if results is not None:
                sources = list(arrays)
                for number in plan.flat:
                    sources[number] = arrays[number].ravel()
            # Infinities and NaNs pass silently, as in a sum by MPI.
            with np.errstate(all='ignore'):
                self._run(plan.chunks, sources, targets, factor)

    def bcast(self, arrays: Sequence[np.ndarray]) -> None:
        """Copies the arrays of rank 0 into those of all ranks.  Collective: every rank calls it.

        Args:
            arrays: Host arrays of any one dtype.  The shapes are the same on all ranks.

        Raises:
            RuntimeError: If another rank of the node failed or ended in the middle.
        """
        with _flat(arrays, range(len(arrays))) as flat:
            data = [array.view(np.uint8) for array in flat]
            self._run(self._plan(self._copied, data, np.dtype(np.uint8)).chunks, data, data)

    def wait_patiently(self, patient: bool) -> None:
        """Says whether to wait for other ranks without looking all the time."""
        self._window.is_patient = patient

    def free(self) -> None:
        """Frees the memory.  Collective: every rank calls it, once."""
        self._plans.clear()
        self._inputs, self._output = [], np.empty(0, np.uint8)
        if self._failure is None:
            self._window.free()
        if self._inter is not None:
            self._inter.Free()
        self._intra.Free()

    def _run(self, chunks: list[Any], sources: list[Any], targets: list[Any],
             scale: Any = None) -> None:
        """Takes all chunks through their stages."""
        if self._failure is not None:
            raise RuntimeError('an earlier exchange of these ranks failed') from self._failure
        window, base, count = self._window, self._step, len(chunks)
        try:
            for k in range(count + 2 * LAG):
                window.wait(base + k - LAG + 1)
                if k >= 2 * LAG:
                    chunks[k - 2 * LAG].unpack(targets, scale)
                if k < count:
                    chunks[k].pack(sources)
                if LAG <= k < count + LAG:
                    chunks[k - LAG].reduce(sources, scale)
                window.publish(base + k + 1)
        except BaseException as error:
            self._failure = error
            window.fail()
            raise
        self._step = base + count + 2 * LAG

    def _plan(self, make: Callable[..., Any], arrays: Sequence[Any], dtype: np.dtype) -> _Plan:
        """What to do with each chunk; as last time, if the arrays have the shapes of last time."""
        shapes = packing.shapes_of(arrays)
        key = make.__name__, dtype, shapes
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                del self._plans[next(iter(self._plans))]  # the oldest
            flat: set[int] = set()
            chunks = [make(pieces, shapes, number % _SLOTS, dtype, flat)
                      for number, pieces in enumerate(chunking.cut(
                          [*map(math.prod, shapes)], self._chunk // dtype.itemsize))]
            plan = self._plans[key] = _Plan(chunks, sorted(flat))
        return plan

    def _summed(self, pieces: list[Piece], shapes: Sequence[tuple[int, ...]], slot: int,
                dtype: np.dtype, flat: set[int]) -> Any:
        """A chunk; adds to ``flat`` the numbers of the arrays that it wants flat."""
        length = pieces[-1].end
        output = self._slot(self._output, slot, dtype)[:length]
        inputs = [self._slot(segment, slot, dtype)[:length] for segment in self._inputs]
        own = length, length
        if self._intra.rank < self._slices:
            own = chunking.slices(length, self._slices)[self._intra.rank]
        if len(pieces) <= FEW:
            flat.update(piece.array for piece in pieces)
            return FewPieces(pieces, inputs, self._intra.rank, output, own, self._inter)
        run = Run(pieces, shapes)
        flat.update(run.flat)
        return ManyPieces(run, inputs, self._intra.rank, output, own, self._inter)

    def _copied(self, pieces: list[Piece], shapes: Sequence[tuple[int, ...]], slot: int,
                dtype: np.dtype, flat: set[int]) -> Any:
        output = self._slot(self._output, slot, dtype)[:pieces[-1].end]
        return Copied(Run(pieces, shapes), output, self._intra.rank == 0, self._inter)

    def _slot(self, segment: np.ndarray, slot: int, dtype: np.dtype) -> np.ndarray:
        return segment[slot * self._chunk:(slot + 1) * self._chunk].view(dtype)


class _Plan(NamedTuple):
    """What to do with each chunk, and the numbers of the arrays that have to be flat for it."""

    chunks: list[Any]
    flat: list[int]


@contextlib.contextmanager
def _flat(arrays: Sequence[np.ndarray], numbers: Sequence[int]) -> Iterator[list[np.ndarray]]:
    """The arrays, those of some numbers flat; what is written there is in the arrays in the end."""
    flat = list(arrays)
    for number in numbers:
        flat[number] = arrays[number].ravel()
    yield flat
    for number in numbers:
        array = arrays[number]
        if not array.flags.c_contiguous:
            array[...] = flat[number].reshape(array.shape)


def _check_room(size: int) -> None:
    """Raises if no file as large as the window can be made where shared memory lies.

    With too little room, the first write to the window would end the process; and not every MPI
    library tells the other ranks when it fails on one.
    """
    if os.path.isdir('/dev/shm') and hasattr(os, 'posix_fallocate'):
        with tempfile.TemporaryFile(dir='/dev/shm') as file:
            os.posix_fallocate(file.fileno(), 0, size)


def _failures(mpi_comm: Any, attempt: Callable[[], Any]) -> str:
    """Attempts something on all ranks; returns what failed where, the same text on all ranks."""
    failure = ''
    try:
        attempt()
    except Exception as error:
        failure = error.Get_error_string() if isinstance(error, MPI.Exception) else str(error)
    ranks: dict[str, list[int]] = {}
    for rank, said in enumerate(mpi_comm.allgather(failure)):
        if said:
            ranks.setdefault(said, []).append(rank)
    return '; '.join(f'{ranks_text(those)} ({said})' for said, those in ranks.items())
