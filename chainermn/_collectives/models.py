"""Model operations: averaging gradients, broadcasting and comparing parameters."""
from __future__ import annotations

import collections
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import chainer

from chainermn._collectives.context import Context, MpiCommunicator
from chainermn._collectives.operation import operation
from chainermn._consistency import debug_checks
from chainermn._consistency.mismatch import NOT_SENT
from chainermn._diagnostics.unusable import FREED_QUEUE
from chainermn._gradients import compressors, loss_scale, tied_arrays
from chainermn._gradients.codec import GradientCodec, average, has_state
from chainermn._gradients.compressors import Compression
from chainermn._gradients.parameters import Layout, ParameterList
from chainermn._gradients.power_sgd import PowerSGD
from chainermn._operations.call_signature import MAX_UPDATE, pack
from chainermn._process import streams
from chainermn._process.mpi import MPI
from chainermn._transport import topology
from chainermn._transport.array_list import ArrayList
from chainermn._transport.base import Compressor
from chainermn._types import Array, Model

if TYPE_CHECKING:  # imported on first use
    from chainermn._gradients.mean_queue import MeanQueue
    from chainermn._gradients.nccl_mean_queue import NcclMeanQueue

_T = TypeVar('_T')


@operation
def bcast_data(comm: MpiCommunicator, model: Model) -> None:
    context = comm._context
    parameters = ParameterList.of_model(model, 'data')
    layout = _with_ties(_layout(context, parameters, for_mean=False), parameters)
    if context.tracer is not None:
        context.tracer.note_model(parameters)
    context.check.same(pack('bcast_data', number=layout.digest), layout.described)
    context.transport.bcast_arrays(parameters)


@operation('allgather_shards')
def allgather_shards(comm: MpiCommunicator, shards: Sequence[Sequence[Array]]) -> None:
    context = comm._context
    if len(shards) != context.size:
        raise ValueError('allgather_shards needs a list of arrays for each of the '
                         f'{context.size} ranks but got {len(shards)} lists')
    owners, names = _owners(tuple(map(len, shards)))
    arrays = ParameterList.named(dict(zip(names, itertools.chain(*shards), strict=True)))
    layout = _layout(context, arrays, for_mean=False)
    context.check.same(pack('allgather_shards', number=layout.digest), layout.described)
    context.transport.copy_arrays(arrays, owners)


@operation
def multi_node_mean_grad(comm: MpiCommunicator, model: Model, zero_fill: bool = False,
                         compression: Compression = None) -> None:
    context = comm._context
    gradients, compressor = checked_gradients(context, model, zero_fill, compression)
    if compressor is None:
        context.transport.mean(gradients)
    else:
        average(context.transport, gradients, None, compressor,
                functools.partial(_codec, context), loss_scale.unify(model.params()))
    check_means(context, model)


@operation('multi_node_mean_grad')
def mean_grad_shards(comm: MpiCommunicator, model: Model, zero_fill: bool,
                     shards: Sequence[Mapping[str, tuple[int, int]]]) -> None:
    context = comm._context
    gradients, _ = checked_gradients(context, model, zero_fill, None)
    needed: collections.Counter[str] = collections.Counter()
    for shard in shards:
        needed.update({path: end - begin for path, (begin, end) in shard.items()})
    flat: dict[str, Array] = {}  # arrays that are divided among ranks
    common: list[Array] = []
    for path, x in zip(gradients.paths, gradients, strict=True):
        if path in needed and needed[path] <= x.size:
            flat[path] = x.reshape(-1)
        else:
            common.append(x)
    parts = [(rank, flat[path][begin:end]) for rank, shard in enumerate(shards)
             for path, (begin, end) in shard.items() if path in flat]
    if common:
        context.transport.mean(ArrayList.of(common))
    if parts:
        context.transport.mean_for_owners(
            ArrayList.of(part for _, part in parts), tuple([rank for rank, _ in parts]))
    for path, x in zip(gradients.paths, gradients, strict=True):
        if path in flat and not x.flags.c_contiguous:
            x[...] = flat[path].reshape(x.shape)


def mean_queue(comm: MpiCommunicator) -> MeanQueue | NcclMeanQueue:
    """Return the queue of a communicator; the first call creates it."""
    context = comm._context
    if context.mean_queue is None:
        context.check.same(pack('mean_queue'))
        context.background = comm._like_this(context.mpi_comm.Dup())
        context.background._context.transport.connect()  # here, because it is collective
        context.mean_queue = comm._new_mean_queue(context.mpi_comm.Dup(), context.background)
        context.free_first(context.mean_queue.free, context.background.finalize)
    return context.mean_queue


def new_mean_queue(comm: MpiCommunicator, mpi_comm: MPI.Intracomm, background: MpiCommunicator
                   ) -> MeanQueue:
    """Create a queue that averages on a background communicator."""
    from chainermn._gradients.mean_queue import MeanQueue  # most scripts do not need it

    context, other = comm._context, background._context
    is_profitable = context.topology.inter_size > 1 or topology.are_cores_left(context.mpi_comm)
    return MeanQueue(
        mpi_comm, weak_partial(queue_gradients, comm), weak_partial(check_means, context),
        other.transport,
        functools.partial(_codec, other), is_profitable, other.check.record)


def weak_partial(function: Callable[..., _T], owner: MpiCommunicator | Context
                 ) -> Callable[..., _T]:
    """Bind ``owner`` as the first argument of a function without keeping ``owner`` alive.

    A queue is held until all ranks have dropped its communicator, so the queue must not keep the
    communicator alive.
    """
    reference = weakref.ref(owner)

    def call(*args: object) -> _T:
        if (alive := reference()) is None:
            raise RuntimeError(FREED_QUEUE)
        return function(alive, *args)

    return call


@operation
def queue_gradients(comm: MpiCommunicator, model: Model, zero_fill: bool, compression: Compression,
                    notify: bool = False) -> tuple[dict[str, Array], bool]:
    """Return the gradients of a model by path, and whether any rank notifies the others."""
    context = comm._context
    assert context.background is not None
    comm._configure(context.background)
    gradients, _, signature, described = _gradients(
        context, 'queue_gradients', model, zero_fill, compression)
    notified = context.check.gather_equal(signature, bytes([notify]), described)
    # notified is None if the calls match except in a part that may differ, such as the device.
    return gradients.by_path(), notified is None or bytes([True]) in notified


def check_means(context: Context, model: Model) -> None:
    """Check mean gradients in debug mode."""
    if (context.debug or chainer.is_debug()) and context.transport.averages:
        debug_checks.check_means(model)


@operation
def check_replicas(comm: MpiCommunicator, model: Model) -> None:
    if comm._context.transport.averages:  # otherwise the replicas differ
        debug_checks.check_replicas(model, comm.allgather_obj)


def checked_gradients(context: Context, model: Model, zero_fill: bool, compression: Compression
                      ) -> tuple[ParameterList, Compressor | PowerSGD | None]:
    """Return the gradients of a model and the compressor, after the consistency check."""
    gradients, compressor, signature, described = _gradients(
        context, 'multi_node_mean_grad', model, zero_fill, compression)
    context.check.same(signature, described)
    return gradients, compressor


def _gradients(context: Context, operation: str, model: Model, zero_fill: bool,
               compression: Compression
               ) -> tuple[ParameterList, Compressor | PowerSGD | None, bytes, Mapping[str, str]]:
    """Return the gradients of a model, the compressor, and the signature with its details."""
    compressor = None if compression is None else _stateful(compression)
    gradients = ParameterList.of_model(model, 'grad', zero_fill)
    layout = gradients.layout(context.transport.allows_mixed_devices)
    if compressor is not None and gradients.on_host:
        _hint_at_single_host(context)
    if compressor is not None or context.transport.needs_device:
        layout = _layout(context, gradients, True, compressor)
    if (context.debug or chainer.is_debug()) and context.transport.averages:
        try:
            debug_checks.check_local_gradients(gradients.by_path())
        except ValueError as error:
            # Scripts for ChainerMN 7 look for " diverged " in the first line.
            context.check.refuse('multi_node_mean_grad', error, 'Parameters diverged '
                                 f'before allreduce; {NOT_SENT}')
    if context.tracer is not None:
        context.tracer.note_model(gradients)
    update = min(context.check.update.since_last, MAX_UPDATE)
    return (gradients, compressor, pack(operation, number=layout.digest, update=update),
            layout.described)


def _hint_at_single_host(context: Context) -> None:
    """Print once that compression only costs time if all ranks are on one node."""
    if context.rank == 0 and context.size > 1 and context.topology.inter_size == 1:
        _print_once('chainermn: compression slows down communication within a single node. Use it '
                    'only if the network between nodes is the bottleneck.\n')


def _layout(context: Context, arrays: ParameterList, for_mean: bool,
            compressor: Compressor | PowerSGD | None = None) -> Layout:
    """Return the properties of the arrays of a model that must be the same on all ranks."""
    layout = arrays.layout(context.transport.allows_mixed_devices)
    more = {} if compressor is None else {'compression': compressors.describe(compressor)}
    if context.transport.needs_device:
        more |= context.transport.requirements(arrays.paths, arrays, for_mean)
    return Layout.of({**layout.described, **more}) if more else layout


def _codec(context: Context, gradients: ParameterList, compressor: Compressor | PowerSGD,
           scale: float | None) -> GradientCodec:
    """Create a codec that compares the encoded arrays of all ranks before they are sent.

    Errors of the compressor are raised on all ranks.
    """
    def check(details: Callable[[], dict[str, str]], consequence: str) -> None:
        try:
            layout = Layout.of(details())
        except Exception as error:
            context.check.refuse('multi_node_mean_grad', error, consequence)
        context.check.same(
            pack('multi_node_mean_grad', number=layout.digest), layout.described)

    return GradientCodec(compressor, gradients, check, scale)


def _with_ties(layout: Layout, parameters: ParameterList) -> Layout:
    """Add to a layout which parameters share memory, because all ranks must tie the same ones."""
    ties = {parameters.paths[i]: f'shares memory with {parameters.paths[group[0]]}'
            for group in tied_arrays.sharing_memory(parameters) for i in group[1:]}
    return Layout.of({path: f'{text}, {ties[path]}' if path in ties else text
                      for path, text in layout.described.items()}) if ties else layout


@functools.lru_cache(maxsize=64)
def _owners(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the owners and the names of the arrays in lists of the given lengths."""
    numbers = [(rank, n) for rank, length in enumerate(lengths) for n in range(length)]
    return (tuple([rank for rank, _ in numbers]),
            tuple([f'array {n} of the shard of rank {rank}' for rank, n in numbers]))


def _stateful(compression: Compression) -> Compressor | PowerSGD | None:
    """Return the compressor. A compressor with state must be passed as an object, not by name."""
    compressor = compressors.get(compression)
    if compressor is not compression and has_state(compressor):
        raise ValueError(
            f'compression={compression!r} has state (the residuals). Create the compressor once, '
            'with chainermn.communicators.compression.get, and pass the same object to each call.')
    return compressor


@functools.cache
def _print_once(text: str) -> None:
    streams.write(text)
