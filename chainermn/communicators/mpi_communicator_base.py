"""A communicator on MPI, and the template by which its gradients are averaged."""
from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mpi4py import MPI
from mpi4py.util import pkl5

from chainermn.communicators import (
    _bucket,
    _compressed,
    _debug,
    _doing,
    _end,
    _header,
    _topology,
    _watch,
    _wire,
    compression,
)
from chainermn.communicators._agreement import Agreement
from chainermn.communicators._header import pack
from chainermn.communicators._mean_queue import MeanQueue
from chainermn.communicators._messages import Messages
from chainermn.communicators._object_verbs import ObjectVerbs
from chainermn.communicators._recent import Calls
from chainermn.communicators._reduction_verbs import ReductionVerbs
from chainermn.communicators._service import Service, check_service
from chainermn.communicators._transport import MpiTransport

_INT_MAX = 2**31 - 1  # of a C int


class MpiCommunicatorBase(ReductionVerbs, ObjectVerbs):
    """All verbs of :class:`CommunicatorBase` on MPI.  Collective: every rank makes one.

    A subclass says which gradients share a buffer (:meth:`_groups`) and how a buffer is summed
    (:meth:`_sum_in_place`); that is all in which the MPI communicators differ.

    Args:
        mpi_comm: ``mpi4py.MPI.Intracomm``.  Arrays, objects and the agreement travel on duplicates
            of it, so that nothing can be taken for the user's own messages on it.
    """

    def __init__(self, mpi_comm: Any) -> None:
        super().__init__()
        self._mpi_comm = mpi_comm
        self._is_part = False  # made by split or new_group, together with mpi_comm
        self._rank = mpi_comm.rank
        self._size = mpi_comm.size
        _doing.know_class(type(self))
        _end.cover(mpi_comm)
        self._agreement = Agreement(mpi_comm.Dup())
        _end.watch(self._agreement)
        self._arrays = mpi_comm.Dup()
        self._objects = pkl5.Intracomm(mpi_comm.Dup())
        self._messages = Messages(self._arrays, self._objects)
        self._mpi_transport = MpiTransport(self._arrays)
        _end.covered()
        self._topology = _topology.discover(self._arrays)
        self._mean_queue: Any = None
        self._twin: Any = None  # on which the queue exchanges
        with self.config_scope():
            self.batched_copy = False
            self.timeout = None

    # --- who and where -----------------------------------------------------------------------

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator this one was made from, for the user's own messages."""
        return self._mpi_comm

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def intra_rank(self) -> int:
        return self._topology.intra_rank

    @property
    def intra_size(self) -> int:
        return self._topology.intra_size

    @property
    def inter_rank(self) -> int:
        return self._topology.inter_rank

    @property
    def inter_size(self) -> int:
        return self._topology.inter_size

    # --- how long a verb may take -------------------------------------------------------------

    def recent_calls(self) -> tuple[Calls, ...]:
        """Where the calls of this communicator are kept, for reports."""
        return self._agreement.calls, self._messages.calls

    @property
    def timeout(self) -> float | None:
        return self._agreement.calls.limit

    @timeout.setter
    def timeout(self, value: float | None) -> None:
        for calls in self.recent_calls():
            calls.limit = value

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        if name != 'timeout' or kwargs:
            super().set_config(name, value, **kwargs)
            return
        limit = None if value is None else _watch.limit_of(value)
        _watch.get().allow(limit)
        with self.config_scope():
            self.timeout = limit

    # --- groups ------------------------------------------------------------------------------

    def split(self, color: int, key: int) -> Any:
        try:
            color, key = operator.index(color), operator.index(key)
            if not (0 <= color <= _INT_MAX and -_INT_MAX <= key <= _INT_MAX):
                raise ValueError(f'color has to be from 0 to {_INT_MAX} and key of that size, not '
                                 f'{color} and {key}')
        except Exception as error:
            self.refuse('split', error)
        self._agreement.same(pack('split'))
        return self._like_this(self._arrays.Split(color, key))

    def new_group(self, ranks: Sequence[int]) -> Any:
        try:
            if isinstance(ranks, (bool, int, str)) or any(isinstance(r, bool) for r in ranks):
                raise TypeError(f'the ranks of a group have to be a list of integers, not '
                                f'{ranks!r}')
            members = [operator.index(rank) for rank in ranks]
            if not members or sorted(set(members)) != sorted(members):
                raise ValueError(f'a group takes each of its ranks once, and at least one, but got '
                                 f'{members}')
            if not (min(members) >= 0 and max(members) < self._size):
                raise ValueError(f'the ranks of a group have to be from 0 to {self._size - 1}, not '
                                 f'{members}')
        except Exception as error:
            self.refuse('new_group', error)
        self._agreement.same(pack('new_group', number=_header.digest(members)),
                             {'ranks': str(members)})
        if self._rank not in members:
            self._arrays.Split(MPI.UNDEFINED)
            return None
        return self._like_this(self._arrays.Split(0, members.index(self._rank)))

    def _like_this(self, mpi_comm: Any) -> Any:
        """A communicator of the same class and configuration, of some of the ranks."""
        part = type(self)(mpi_comm)
        part._is_part = True
        with part.config_scope():
            for name, value in self._configs.items():
                setattr(part, name, value)
        return part

    def barrier(self) -> None:
        self._agreement.same(pack('barrier'))
        self._arrays.Barrier()

    def serve(self, answer: Callable[[int, Any], Sequence[Any]]) -> Service:
        try:
            check_service(answer)
        except Exception as error:
            self.refuse('serve', error)
        self._agreement.same(pack('serve'))
        return Service(self._arrays.Dup(), answer)

    def refuse(self, verb: str, error: Exception) -> NoReturn:
        self._agreement.refuse(verb, error)

    def agree_to_join(self, number: int) -> tuple[int, ...]:
        headers = self._agreement.exchange(pack('join', number=number))
        return tuple(header.number for header in headers)

    def said_in_join(self, error: BaseException) -> tuple[int | None, ...] | None:
        headers = self._agreement.headers_of(error)
        if headers is None:
            return None
        if any(header.refused or header.verb == _header.END for header in headers):
            return ()
        return tuple(header.number if header.verb == 'join' else None for header in headers)

    def finalize(self) -> None:
        if isinstance(self._arrays, _Finalized):
            return
        if pending := self._messages.receiving():
            self.refuse('finalize', RuntimeError(
                f'{len(pending)} requests are not complete, such as {pending[0]}; wait() for '
                'them first'))
        self._agreement.same(pack('finalize'))
        if self._mean_queue is not None:
            self._mean_queue.free()
            self._twin.finalize()
        _end.forget(self._agreement)
        self._agreement.mpi_comm.Free()
        self._objects.Free()
        self._arrays.Free()
        if self._is_part:
            self._mpi_comm.Free()
        for name in ('_agreement', '_arrays', '_objects', '_messages', '_mpi_transport'):
            setattr(self, name, _Finalized())

    def bcast_data(self, model: Any) -> None:
        arrays = self._agreed_parameters('bcast_data', model, 'data')
        for group in self._groups(list(arrays.values())):
            self._bcast_in_place(group)

    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False,
                             compression: Any = None) -> None:
        arrays, compressor = self._agreed_gradients(model, zero_fill, compression)
        if compressor is None:
            for group in self._groups(_bucket.listed(arrays)):
                self._mean_in_place(group)
        else:
            self._compressed_means(arrays, compressor, list(arrays.values()))
        self._check(model)

    def mean_queue(self) -> Any:
        if self._mean_queue is None:
            self._agreement.same(pack('mean_queue'))
            self._twin = self._like_this(self._arrays.Dup())
            self._mean_queue = self._twin._new_mean_queue(self._arrays.Dup(), self._gradients)
        return self._mean_queue

    def _new_mean_queue(self, mpi_comm: Any, agree: Callable[..., dict[str, Any]]) -> Any:
        """A queue that exchanges by this communicator, which is for that alone."""
        can_hide = self.inter_size > 1 or _topology.are_cores_left(self._arrays)
        return MeanQueue(mpi_comm, agree, self._check, self._means, self._wait_patiently, can_hide)

    def _check(self, model: Any) -> None:
        """Checks mean gradients in debug mode."""
        if _debug.is_on():
            _bucket.check_finite(model)

    def _check_own(self, gradients: dict[str, Any]) -> None:
        """Checks the gradients of this rank, in debug mode."""
        _debug.check_own(gradients)

    def check_replicas(self, model: Any) -> None:
        try:
            own = _debug.digests(model)
        except Exception as error:
            self.refuse('check_replicas', error)
        _debug.check_alike(self.allgather_obj(own))

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
            _bucket.unpack(mean, grouped(group), 1, self.batched_copy)

    def _mean_of_wires(self, compressor: Any, wire: Any, buffer: Any) -> Any:
        """Returns the mean of what all ranks compressed from such a buffer."""
        return _compressed.mean(self._arrays, compressor, wire, buffer.size, buffer.dtype)

    def _packed(self, group: list[Any]) -> Any:
        return _bucket.pack(group, _wire.summed_in(group[0].dtype), self.batched_copy)

    @abc.abstractmethod
    def _groups(self, arrays: Sequence[Any]) -> list[list[Any]]:
        """Says which arrays, all of one dtype, share a buffer.  One rule for all ranks."""

    def _mean_in_place(self, group: list[Any]) -> None:
        """Replaces arrays of one dtype by their means over all ranks."""
        buffer = self._packed(group)
        _bucket.unpack(self._sum_in_place(buffer), group, 1 / self._size, self.batched_copy)

    def _sum_in_place(self, buffer: Any) -> Any:
        """Returns the sum of the flat buffers of all ranks; may overwrite the buffer."""
        if _wire.on_device(buffer) and not _wire.cuda_aware():
            staged = self._sum_in_place(_wire.to_buffer(buffer))
            return _wire.from_buffer(staged, staged.shape, device=True)
        self._arrays.Allreduce(MPI.IN_PLACE, buffer)
        return buffer

    def _bcast_in_place(self, group: list[Any]) -> None:
        device = _wire.on_device(group[0])
        if self._rank == 0:
            self._arrays.Bcast(_wire.raw(_wire.to_buffer(_bucket.pack(group))))
            return
        shape = (sum(array.size for array in group),)
        buffer = _wire.new_buffer(shape, group[0].dtype, device)
        self._arrays.Bcast(_wire.raw(buffer))
        _bucket.unpack(_wire.from_buffer(buffer, shape, device), group)

    def _agreed_parameters(self, verb: str, model: Any, attribute: str, zero_fill: bool = False,
                           compressor: Any = None) -> dict[str, Any]:
        """The arrays of a model by path, once all ranks are known to have the like."""
        try:
            arrays = _bucket.parameters(model, attribute, zero_fill)
            described = self._described(verb, arrays)
            if verb == 'multi_node_mean_grad' and _debug.is_on():
                self._check_own(arrays)
            if compressor is not None:
                described = described | {'compression': compression.describe(compressor)}
        except Exception as error:
            self.refuse(verb, error)
        self._agreement.same(pack(verb, number=_header.digest(described)), described)
        return arrays

    def _agreed_gradients(self, model: Any, zero_fill: bool, compressed: Any
                          ) -> tuple[dict[str, Any], Any]:
        """The gradients by path, and the compressor for them or ``None``."""
        try:
            compressor = compression.get(compressed)
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
            wires = _compressed.wires(compressor, buffers, f'{_header.digest(list(arrays)):x}')
            described = _compressed.describe(wires)
        except Exception as error:
            self.refuse('multi_node_mean_grad', error)
        self._agreement.same(
            pack('multi_node_mean_grad', number=_header.digest(described)), described)
        return wires

    def _described(self, verb: str, arrays: dict[str, Any]) -> dict[str, str]:
        """What has to be equal on all ranks, by path.  May refuse the arrays."""
        return _bucket.describe(arrays)


def _beside(xs: Sequence[Any], ys: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """What finds the arrays ``ys`` that belong to some of ``xs``, each once.

    Two gradients may be one array.
    """
    places: dict[int, list[Any]] = {}
    for x, y in zip(xs, ys, strict=True):
        places.setdefault(id(x), []).append(y)
    return lambda group: [places[id(x)].pop(0) for x in group]


class _Finalized:
    """Stands for what a finalized communicator no longer has."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError('this communicator was finalized; make a new one with '
                           'chainermn.create_communicator')
