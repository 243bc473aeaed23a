"""Model operations: average gradients, broadcast and compare parameters."""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import chainer

from chainermn._collectives.objects import ObjectOperations
from chainermn._collectives.operation import operation
from chainermn._consistency import debug_checks
from chainermn._consistency.mismatch import NOT_SENT
from chainermn._gradients import compressors, tied_arrays
from chainermn._gradients.codec import GradientCodec, average
from chainermn._gradients.compressors import Compression
from chainermn._gradients.mean_queue import MeanQueue
from chainermn._gradients.parameters import Layout, ParameterList
from chainermn._gradients.power_sgd import PowerSGD
from chainermn._operations.call_signature import MAX_UPDATE, pack
from chainermn._process import streams
from chainermn._process.mpi import MPI
from chainermn._transport import topology
from chainermn._transport.base import Compressor
from chainermn._transport.mpi_transport import MpiTransport
from chainermn._types import Array, Model

if TYPE_CHECKING:  # CPUs do not need it
    from chainermn._gradients.nccl_mean_queue import NcclMeanQueue


class ModelOperations(ObjectOperations):
    """Model operations of a communicator on MPI; its transport moves the data."""

    _topology: topology.Topology
    _mean_queue: MeanQueue | NcclMeanQueue | None = None
    _background: ModelOperations | None = None  # the communicator of the queue
    _has_debug_variable: bool  # when the communicator was created

    def _like_this(self, mpi_comm: MPI.Comm) -> ModelOperations:
        """Make a communicator of the same class and configuration."""
        raise NotImplementedError

    def _configure(self, other: ModelOperations) -> None:
        """Give another communicator the configuration of this one."""
        raise NotImplementedError

    @operation
    def bcast_data(self, model: Model) -> None:
        parameters = ParameterList.of_model(model, 'data')
        layout = _with_ties(self._layout(parameters, for_mean=False), parameters)
        if self._tracer is not None:
            self._tracer.note_model(parameters)
        self._consistency.same(pack('bcast_data', number=layout.digest), layout.described)
        self._transport.bcast_arrays(parameters)

    @operation('allgather_shards')
    def _allgather_shards(self, shards: Sequence[Sequence[Array]]) -> None:
        if len(shards) != self._size:
            raise ValueError('allgather_shards needs a list of arrays for each of the '
                             f'{self._size} ranks, got {len(shards)} lists')
        owners, names = _owners(tuple(map(len, shards)))
        arrays = ParameterList.named(dict(zip(names, itertools.chain(*shards), strict=True)))
        layout = self._layout(arrays, for_mean=False)
        self._consistency.same(pack('allgather_shards', number=layout.digest), layout.described)
        self._transport.copy_arrays(arrays, owners)

    @operation
    def multi_node_mean_grad(self, model: Model, zero_fill: bool = False,
                             compression: Compression = None) -> None:
        gradients, compressor = self._checked_gradients(model, zero_fill, compression)
        if compressor is None:
            self._transport.mean(gradients)
        else:
            average(self._transport, gradients, None, compressor, self._codec)
        if self._has_debug_variable or chainer.is_debug():
            self._check_means(model)

    @operation('multi_node_mean_grad')
    def _mean_grad_shard(self, model: Model, zero_fill: bool, shard: Mapping[str, tuple[int, int]]
                        ) -> None:
        # A subclass that replaces the mean replaces it for shards too.
        if type(self).multi_node_mean_grad is not ModelOperations.multi_node_mean_grad:
            self.multi_node_mean_grad(model, zero_fill)
            return
        gradients, _ = self._checked_gradients(model, zero_fill, None)
        self._transport.mean_shard(gradients, [
            shard.get(path, (0, x.size))
            for path, x in zip(gradients.paths, gradients, strict=True)])

    @operation
    def mean_queue(self) -> MeanQueue | NcclMeanQueue:
        if type(self).multi_node_mean_grad is not ModelOperations.multi_node_mean_grad:
            raise ValueError(f'{type(self).__name__} averages gradients in its own '
                             'multi_node_mean_grad, which cannot run during backward: use '
                             'overlap=False')
        if self._mean_queue is None:
            self._consistency.same(pack('mean_queue'))
            self._background = self._like_this(self._arrays.Dup())
            transport = self._background._transport
            transport.connect()  # now, as all ranks are here
            self._mean_queue = self._new_mean_queue(self._arrays.Dup(), transport)
        return self._mean_queue

    def _new_mean_queue(self, mpi_comm: MPI.Intracomm, transport: MpiTransport
                        ) -> MeanQueue | NcclMeanQueue:
        """Create a queue that uses the transport of the background communicator."""
        assert self._background is not None
        is_profitable = self._topology.inter_size > 1 or topology.are_cores_left(self._arrays)
        return MeanQueue(mpi_comm, self._queue_gradients, self._check_means, transport,
                         self._background._codec, is_profitable,
                         self._background._consistency.calls)

    @operation('queue_gradients')
    def _queue_gradients(self, model: Model, zero_fill: bool, compression: Compression,
                         notify: bool = False) -> tuple[dict[str, Array], bool]:
        """Return the gradients of a model by path, and whether any rank notifies the others."""
        assert self._background is not None
        self._configure(self._background)
        gradients, _, signature, described = self._gradients(
            'queue_gradients', model, zero_fill, compression)
        notified = self._consistency.gather_equal(signature, bytes([notify]), described)
        # None: the calls match, but differ in a part that may differ, such as the device.
        return gradients.by_path(), notified is None or bytes([True]) in notified

    def _check_means(self, model: Model) -> None:
        """Check mean gradients in debug mode."""
        if (self._has_debug_variable or chainer.is_debug()) and self._transport.averages:
            debug_checks.check_means(model)

    @operation
    def check_replicas(self, model: Model) -> None:
        if not self._transport.averages:
            return  # the replicas differ, since no gradients are exchanged
        own = debug_checks.digests(model)
        debug_checks.check_equal(self.allgather_obj(own))

    def _checked_gradients(self, model: Model, zero_fill: bool, compression: Compression
                           ) -> tuple[ParameterList, Compressor | PowerSGD | None]:
        """Return the gradients of a model, after the consistency check, and the compressor."""
        gradients, compressor, signature, described = self._gradients(
            'multi_node_mean_grad', model, zero_fill, compression)
        self._consistency.same(signature, described)
        return gradients, compressor

    def _gradients(self, operation: str, model: Model, zero_fill: bool, compression: Compression
                   ) -> tuple[ParameterList, Compressor | PowerSGD | None, bytes,
                              Mapping[str, str]]:
        """Return the gradients of a model, the compressor, and the signature with its details."""
        compressor = None if compression is None else _stateful(compression)
        gradients = ParameterList.of_model(model, 'grad', zero_fill)
        layout = gradients.layout(self._transport.allows_mixed_devices)
        if compressor is not None and gradients.on_host:
            self._hint_at_single_host()
        if compressor is not None or self._transport.needs_device:
            layout = self._layout(gradients, True, compressor)
        if (self._has_debug_variable or chainer.is_debug()) and self._transport.averages:
            try:
                debug_checks.check_own(gradients.by_path())
            except ValueError as error:
                # Programs for ChainerMN 7 look for " diverged " in the first line.
                self._consistency.refuse('multi_node_mean_grad', error, 'Parameters diverged '
                                         f'before allreduce; {NOT_SENT}')
        if self._tracer is not None:
            self._tracer.note_model(gradients)
        update = min(self._consistency.update.since_last, MAX_UPDATE)
        return (gradients, compressor, pack(operation, number=layout.digest, update=update),
                layout.described)

    def _hint_at_single_host(self) -> None:
        """Print once that compression takes time but saves none, if all ranks are on one host."""
        if self._rank == 0 and self._size > 1 and self._topology.inter_size == 1:
            _print_once('chainermn: compression makes exchanges slower on a single host. It '
                        'pays off if the network between hosts is the bottleneck.\n')

    def _layout(self, arrays: ParameterList, for_mean: bool,
                compressor: Compressor | PowerSGD | None = None) -> Layout:
        """Return the properties of the arrays of a model that must be equal on all ranks."""
        layout = arrays.layout(self._transport.allows_mixed_devices)
        more = {} if compressor is None else {'compression': compressors.describe(compressor)}
        if self._transport.needs_device:
            more |= self._transport.requirements(arrays.paths, arrays, for_mean)
        return Layout.of({**layout.described, **more}) if more else layout

    def _codec(self, gradients: ParameterList, compressor: Compressor | PowerSGD) -> GradientCodec:
        """Create a codec that compares the encoded arrays of all ranks before they are sent.

        It raises errors of a compressor on all ranks.
        """
        def check(details: Callable[[], dict[str, str]], consequence: str) -> None:
            try:
                layout = Layout.of(details())
            except Exception as error:
                self._consistency.refuse('multi_node_mean_grad', error, consequence)
            self._consistency.same(
                pack('multi_node_mean_grad', number=layout.digest), layout.described)

        return GradientCodec(compressor, gradients.paths, check)


def _with_ties(layout: Layout, parameters: ParameterList) -> Layout:
    """Add which parameters share memory: with ties on some ranks only, training would differ."""
    ties = {parameters.paths[i]: f'shares memory with {parameters.paths[group[0]]}'
            for group in tied_arrays.groups(parameters) for i in group[1:]}
    return Layout.of({path: f'{text}, {ties[path]}' if path in ties else text
                      for path, text in layout.described.items()}) if ties else layout


@functools.lru_cache(maxsize=64)
def _owners(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the owner and the name of each array in lists of those lengths."""
    numbers = [(rank, n) for rank, length in enumerate(lengths) for n in range(length)]
    return (tuple([rank for rank, _ in numbers]),
            tuple([f'array {n} of the shard of rank {rank}' for rank, n in numbers]))


def _stateful(compression: Compression) -> Compressor | PowerSGD | None:
    """Return the compressor; one with state must be an object, not a name."""
    compressor = compressors.get(compression)
    if compressor is not compression and hasattr(compressor, 'reset'):
        raise ValueError(
            f'compression={compression!r} has state (the residuals). Create the compressor once, '
            'with chainermn.communicators.compression.get, and pass the same object to each call')
    return compressor


@functools.cache
def _print_once(text: str) -> None:
    streams.write(text)
