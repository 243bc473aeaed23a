"""The operations for models: the template by which gradients are averaged."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpi4py import MPI

from chainermn import _signature
from chainermn._collectives.objects import ObjectOperations
from chainermn._collectives.operation import collective
from chainermn._consistency import debug_checks
from chainermn._gradients import compressed_mean, compressors
from chainermn._gradients.reducer import MeanQueue
from chainermn._signature import pack
from chainermn._transport import array_buffers, packing, topology


class ModelOperations(ObjectOperations):
    """The part of a communicator on MPI that exchanges parameters and gradients.

    As it is, it exchanges each array by itself.  A subclass says which arrays share a buffer
    (:meth:`_groups`) and how a buffer is summed (:meth:`_sum_in_place`), or only defines
    :meth:`multi_node_mean_grad`.
    """

    batched_copy: bool
    _configs: dict[str, Any]
    _topology: topology.Topology
    _like_this: Callable[[Any], Any]
    _update = 0  # that the optimizer that calls has begun since its last exchange
    _mean_queue: Any = None
    _twin: Any = None  # on which the queue exchanges

    @collective
    def bcast_data(self, model: Any) -> None:
        arrays = self._agreed_parameters('bcast_data', model, 'data')
        for group in self._groups(list(arrays.values())):
            self._bcast_in_place(group)

    @collective
    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False,
                             compression: Any = None) -> None:
        arrays, compressor = self._agreed_gradients(model, zero_fill, compression)
        if compressor is None:
            for group in self._groups(packing.listed(arrays)):
                self._mean_in_place(group)
        else:
            self._compressed_means(arrays, compressor, list(arrays.values()))
        self._check(model)

    @contextlib.contextmanager
    def at_update(self, number: int, since_last: int) -> Iterator[None]:
        self._update = min(since_last, _signature.MAX_UPDATE)
        self._agreement.note = f', update {number}' + (
            f', {since_last} since the last exchange' if since_last > 1 else '')
        try:
            yield
        finally:
            self._update, self._agreement.note = 0, ''

    def mean_queue(self) -> Any:
        if not self._has_queue():
            raise ValueError(f'{type(self).__name__} averages gradients in its own '
                             'multi_node_mean_grad, which cannot run beside backward: use '
                             'overlap=False')
        if self._mean_queue is None:
            self._agreement.same(pack('mean_queue'))
            self._twin = self._like_this(self._arrays.Dup())
            self._mean_queue = self._twin._new_mean_queue(self._arrays.Dup(), self._gradients)
        return self._mean_queue

    @classmethod
    def _has_queue(cls) -> bool:
        """Whether the queue averages as multi_node_mean_grad does, which a subclass may define."""
        own, queue = (next(base for base in cls.__mro__ if name in vars(base))
                      for name in ('multi_node_mean_grad', '_new_mean_queue'))
        return issubclass(queue, own)

    def _new_mean_queue(self, mpi_comm: Any, agree: Callable[..., dict[str, Any]]) -> Any:
        """A queue that exchanges by this communicator, which is for that alone."""
        can_hide = self._topology.inter_size > 1 or topology.are_cores_left(self._arrays)
        return MeanQueue(mpi_comm, agree, self._check, self._means, self._wait_patiently, can_hide)

    def _check(self, model: Any) -> None:
        """Checks mean gradients in debug mode."""
        if debug_checks.is_on():
            packing.check_finite(model)

    def _check_own(self, gradients: dict[str, Any]) -> None:
        """Checks the gradients of this rank, in debug mode."""
        debug_checks.check_own(gradients)

    @collective
    def check_replicas(self, model: Any) -> None:
        try:
            own = debug_checks.digests(model)
        except Exception as error:
            self.refuse('check_replicas', error)
        debug_checks.check_alike(self.allgather_obj(own))

    def _gradients(self, model: Any, zero_fill: bool, compression: Any) -> dict[str, Any]:
        for name, value in self._configs.items():
            with self._twin.config_scope():
                setattr(self._twin, name, value)
        return self._agreed_gradients(model, zero_fill, compression)[0]

    def _means(self, arrays: dict[str, Any], compressor: Any, results: list[Any]) -> None:
        """Puts the means of arrays by path over all ranks into results."""
        xs = list(arrays.values())
        if compressor is not None:
            self._compressed_means(arrays, compressor, results)
            return
        grouped = _beside(xs, results)
        for group in self._groups(xs):
            self._mean(group, grouped(group))

    def _mean(self, group: list[Any], results: list[Any]) -> None:
        """Puts the means of arrays of one dtype over all ranks into results."""
        for x, y in zip(group, results, strict=True):
            y[...] = x
        self._mean_in_place(results)

    def _wait_patiently(self, patient: bool) -> None:
        """Says whether waiting for other ranks may use a core."""

    def _compressed_means(self, arrays: dict[str, Any], compressor: Any, results: list[Any]
                          ) -> None:
        groups = self._groups(list(arrays.values()))
        buffers = [self._packed(group) for group in groups]
        wires = self._agreed_wires(compressor, buffers, arrays)
        grouped = _beside(list(arrays.values()), results)
        for group, buffer, wire in zip(groups, buffers, wires, strict=True):
            mean = self._mean_of_wires(compressor, wire, buffer)
            packing.unpack(mean, grouped(group), 1, self.batched_copy)

    def _mean_of_wires(self, compressor: Any, wire: Any, buffer: Any) -> Any:
        """Returns the mean of what all ranks compressed from such a buffer."""
        return compressed_mean.mean(self._arrays, compressor, wire, buffer.size, buffer.dtype)

    def _packed(self, group: list[Any]) -> Any:
        return packing.pack(group, array_buffers.summed_in(group[0].dtype), self.batched_copy)

    def _groups(self, arrays: Sequence[Any]) -> list[list[Any]]:
        """Says which arrays, all of one dtype, share a buffer.  One rule for all ranks."""
        return [[array] for array in arrays]

    def _mean_in_place(self, group: list[Any]) -> None:
        """Replaces arrays of one dtype by their means over all ranks."""
        buffer = self._packed(group)
        packing.unpack(self._sum_in_place(buffer), group, 1 / self.size, self.batched_copy)

    def _sum_in_place(self, buffer: Any) -> Any:
        """Returns the sum of the flat buffers of all ranks; may overwrite the buffer."""
        staged = array_buffers.to_buffer(buffer)
        self._arrays.Allreduce(MPI.IN_PLACE, staged)
        return array_buffers.from_buffer(staged, staged.shape, array_buffers.on_device(buffer))

    def _bcast_in_place(self, group: list[Any]) -> None:
        device = array_buffers.on_device(group[0])
        if self.rank == 0:
            self._arrays.Bcast(array_buffers.raw(array_buffers.to_buffer(packing.pack(group))))
            return
        shape = (sum(array.size for array in group),)
        buffer = array_buffers.new_buffer(shape, group[0].dtype, device)
        self._arrays.Bcast(array_buffers.raw(buffer))
        packing.unpack(array_buffers.from_buffer(buffer, shape, device), group)

    def _agreed_parameters(self, verb: str, model: Any, attribute: str, zero_fill: bool = False,
                           compressor: Any = None) -> dict[str, Any]:
        """The arrays of a model by path, once all ranks are known to have the like."""
        try:
            arrays = packing.parameters(model, attribute, zero_fill)
            described = self._described(verb, arrays)
            if verb == 'multi_node_mean_grad' and debug_checks.is_on():
                self._check_own(arrays)
            if compressor is not None:
                described = described | {'compression': compressors.describe(compressor)}
        except Exception as error:
            self.refuse(verb, error)
        update = self._update if verb == 'multi_node_mean_grad' else 0
        self._agreement.same(
            pack(verb, number=_signature.digest(described), update=update), described)
        return arrays

    def _agreed_gradients(self, model: Any, zero_fill: bool, compressed: Any
                          ) -> tuple[dict[str, Any], Any]:
        """The gradients by path, and the compressor for them or ``None``."""
        try:
            compressor = compressors.get(compressed)
            if compressor is not compressed and hasattr(compressor, 'reset'):
                raise ValueError(
                    f'compression={compressed!r} names a compressor that remembers what it did not '
                    'send; make it once, with chainermn.communicators.compression.get, and pass '
                    'the same one to each call')
        except Exception as error:
            self.refuse('multi_node_mean_grad', error)
        return self._agreed_parameters('multi_node_mean_grad', model, 'grad', zero_fill,
                                       compressor), compressor

    def _agreed_wires(self, compressor: Any, buffers: list[Any], arrays: dict[str, Any]
                      ) -> list[Any]:
        """Buffers compressed, once all ranks are known to send as much."""
        try:
            wires = compressed_mean.wires(
                compressor, buffers, f'{_signature.digest(list(arrays)):x}')
            described = compressed_mean.describe(wires)
        except Exception as error:
            self.refuse('multi_node_mean_grad', error)
        self._agreement.same(
            pack('multi_node_mean_grad', number=_signature.digest(described)), described)
        return wires

    def _described(self, verb: str, arrays: dict[str, Any]) -> dict[str, str]:
        """What has to be equal on all ranks, by path.  May refuse the arrays."""
        return packing.describe(arrays)


def _beside(xs: Sequence[Any], ys: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """What finds the arrays ``ys`` that belong to some of ``xs``, each once.

    Two gradients may be one array.
    """
    places: dict[int, list[Any]] = {}
    for x, y in zip(xs, ys, strict=True):
        places.setdefault(id(x), []).append(y)
    return lambda group: [places[id(x)].pop(0) for x in group]
