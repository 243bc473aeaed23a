"""The interface of all communicators.

The operations are named after the functions of MPI (MPI standard, chapters 3 "Point-to-Point" and
6 "Collective Communication"). Operations whose names end in ``_obj`` accept any picklable Python
object; the others accept arrays: ``numpy.ndarray`` or ``cupy.ndarray``.

Every collective operation starts with a consistency check: all ranks compare their calls. If an
argument is invalid on one rank, or ranks call different operations, or pass a different root, op,
dtype or shape where these must be the same, then **every rank raises the same error**. The error
shows what each rank called, and no data is sent.

Communicators are not thread-safe. Messages between two ranks arrive in the order in which they
were sent; large objects and arrays are only transferred while the other rank is receiving them.
"""
from __future__ import annotations

import abc
import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from typing_extensions import TypeVar

from chainermn._consistency import debug_checks
from chainermn._operations.call_signature import NO_UPDATE
from chainermn._types import Array, Object, ReceivedArrays
from chainermn.communicators import _version7
from chainermn.communicators._channel import Channel

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI
    from numpy.typing import DTypeLike
    from typing_extensions import Self

    from chainermn._collectives.nonblocking import Request
    from chainermn._collectives.rpc import Service
    from chainermn._gradients.compressors import Compression
    from chainermn._gradients.power_sgd import PowerSGD
    from chainermn._operations.call_signature import Caller, Update
    from chainermn._transport.base import Compressor
    from chainermn._types import Buffer, Model

#: The type of an object; any type if it cannot be inferred from the arguments.
_T = TypeVar('_T', default=Object)
#: The type of a NumPy or CuPy array, which is also the type of the result.
_A = TypeVar('_A', default=Array)

#: A ChainerMN or mpi4py communicator.
CommunicatorLike: TypeAlias = 'CommunicatorBase | MPI.Intracomm'


class GradientQueue(Protocol):
    """Averages gradients in the background; see :meth:`chainermn.CommunicatorBase.mean_queue`."""

    @property
    def pending(self) -> bool:
        """Whether :meth:`submit` was called since the last :meth:`wait`."""

    @property
    def is_profitable(self) -> bool:
        """Whether ranks can compute while gradients are averaged; the same on all ranks.

        True if averaging uses a network, a device, or a core that no rank needs.
        """

    def gradients(self, model: Model, zero_fill: bool, compression: Compression, notify: bool, /
                  ) -> tuple[dict[str, Array], bool]:
        """Return the gradients of a model by path, after the ranks have compared them.

        Collective: every rank calls it. For the other arguments and the errors, see
        :meth:`chainermn.CommunicatorBase.multi_node_mean_grad`. The second result tells whether
        ``notify`` is true on any rank.
        """

    def submit(self, gradients: dict[str, Array], compressor: Compressor | PowerSGD | None = None,
               scale: float | None = None) -> list[Array]:
        """Start averaging gradients.

        All ranks submit the same gradients in the same order, at any time; no rank waits for
        another one here.

        Args:
            gradients: Gradients by path, at least one; do not change them before :meth:`wait`.
            compressor: Compressor for the gradients, or ``None``.
            scale: Loss scale of the gradients. The state of a compressor must not depend on it.

        Returns:
            One array for each gradient, which contains the mean after :meth:`wait`.
        """

    def wait(self) -> None:
        """Wait until all submitted gradients are averaged."""

    def check(self, model: Model, /) -> None:
        """In debug mode, raise ValueError if a gradient of the model is not finite."""

    def cancel(self) -> None:
        """Drop all submitted gradients. Collective: every rank calls it.

        The ranks may have submitted different numbers of times.
        """


class CommunicatorBase(metaclass=abc.ABCMeta):
    """A group of ranks (processes), numbered from 0 to ``size - 1``.

    Create one with :func:`chainermn.create_communicator`.

    A subclass must define the abstract methods and the properties of ChainerMN 7 (``rank``,
    ``size``, ``intra_rank``, ...); then all features of version 7 work. The other operations call
    these methods, except for ``isend``, ``irecv``, ``waitall``, ``serve`` and ``mean_queue``, which
    raise an error unless the class defines them or derives from
    :class:`~chainermn.communicators.mpi_communicator_base.MpiCommunicatorBase`.

    Attributes assigned inside ``with self.config_scope():`` become configuration items, which
    :meth:`get_config` returns.

    Example:
        >>> comm = chainermn.create_communicator('flat')
        >>> comm
        <FlatCommunicator: rank 0 of 2, on node 0 of 1 as rank 0 of 2>
        >>> comm.rank, comm.size
        (0, 2)
    """

    batched_copy: bool
    _configs: dict[str, object]
    _in_config_scope: bool
    _own_mpi_comm: MPI.Intracomm

    def __new__(cls, *args: object, **kwargs: object) -> Self:  # noqa: D102
        self = super().__new__(cls)  # not in __init__, which subclasses need not call
        object.__setattr__(self, '_configs', {})
        object.__setattr__(self, '_in_config_scope', False)
        return self

    def _missing(self, name: str) -> NoReturn:
        """Raise an error, because a subclass, such as one for ChainerMN 7, has no such member."""
        raise NotImplementedError(
            f'{type(self).__name__} does not define {name!r}. Define it, or derive the class from '
            'chainermn.communicators.mpi_communicator_base.MpiCommunicatorBase, which defines '
            'everything.')

    @classmethod  # noqa: B027  (most communicators have no requirements)
    def _check_requirements(cls) -> None:
        """Check whether this process can use the communicator.

        Raises:
            RuntimeError: If something is missing, such as CuPy or NCCL.
        """

    @classmethod
    def _check_grad_dtype(cls, dtype: DTypeLike) -> np.dtype:
        """Check the dtype in which all gradients are to be averaged.

        Args:
            dtype: A dtype or its name.

        Returns:
            The dtype.

        Raises:
            ValueError: If the communicator cannot average gradients in this dtype.
        """
        raise ValueError(
            f'allreduce_grad_dtype={dtype!r} is not supported by {cls.__name__}, which averages '
            'each gradient in its own dtype. Use pure_nccl, or omit allreduce_grad_dtype.')

    # --- ranks and nodes ---------------------------------------------------------------------

    @property
    def mpi_comm(self) -> MPI.Intracomm:
        """The mpi4py communicator that was passed, for your own messages."""
        if '_own_mpi_comm' not in vars(self):
            raise AttributeError(
                f'{type(self).__name__} was not created from an mpi4py communicator')
        return self._own_mpi_comm

    @mpi_comm.setter
    def mpi_comm(self, value: MPI.Intracomm) -> None:
        vars(self)['_own_mpi_comm'] = value  # by a subclass that defines its own operations

    @property
    def rank(self) -> int:
        """Rank of this process in the communicator, starting at 0."""
        self._missing('rank')

    @property
    def size(self) -> int:
        """Number of ranks."""
        self._missing('size')

    @property
    def intra_rank(self) -> int:
        """Rank of this process among the ranks of its node, starting at 0."""
        self._missing('intra_rank')

    @property
    def intra_size(self) -> int:
        """Number of ranks on this node."""
        self._missing('intra_size')

    @property
    def inter_rank(self) -> int:
        """Index of this node, starting at 0; nodes are ordered by their lowest rank."""
        self._missing('inter_rank')

    @property
    def inter_size(self) -> int:
        """Number of nodes."""
        self._missing('inter_size')

    @property
    def _chainermn_channel(self) -> Channel:
        """The interface that optimizers and functions use beyond the public operations."""
        return Channel(self)

    def __repr__(self) -> str:
        return (f'<{type(self).__name__}: rank {self.rank} of {self.size}, on node '
                f'{self.inter_rank} of {self.inter_size} as rank {self.intra_rank} of '
                f'{self.intra_size}>')

    def __deepcopy__(self, memo: dict[int, object]) -> CommunicatorBase:
        """Return the communicator itself, so that a copy of a model shares it."""
        return self

    # --- configuration -----------------------------------------------------------------------

    def set_config(self, name: str, value: Object = True, **kwargs: object) -> None:
        """Set a configuration item of this communicator.

        Every rank should set the same value. The items are:

        - ``batched_copy`` (bool): on GPUs, copy all gradients to and from the communication buffer
          with one kernel launch.
        - ``timeout`` (float): seconds until an operation times out. The job is then aborted with a
          report that shows what each rank is doing. 0 disables the timeout; ``None`` uses
          ``CHAINERMN_TIMEOUT``.

        Args:
            name: Name of the item.
            value: New value of the item.
            kwargs: Not supported; present because the signature of ChainerMN 7 has it.

        Raises:
            ValueError: If the communicator has no such item.
            TypeError: If other keyword arguments are passed.

        Example:
            >>> comm.set_config('timeout', 600)
            >>> comm.get_config('timeout')
            600.0
        """
        if kwargs:
            raise TypeError(f'set_config got unexpected keyword arguments {sorted(kwargs)}')
        if name != 'batched_copy':
            raise ValueError(f'{type(self).__name__} has no configuration item {name!r}; use one '
                             f'of {sorted(self._configs)}')
        with self.config_scope():
            self.batched_copy = bool(value)

    def get_config(self, name: str | None = None) -> Object:
        """Return the value of a configuration item.

        Args:
            name: Name of the item.

        Returns:
            The value of the item, or a dict of all items if ``name`` is ``None``.

        Raises:
            KeyError: If the communicator has no such item.

        Example:
            >>> comm.get_config('batched_copy')
            True
        """
        if name is None:
            return dict(self._configs)
        return self._configs[name]

    @contextlib.contextmanager
    def config_scope(self) -> Iterator[None]:
        """Return a context in which assigned attributes become configuration items.

        Example:
            >>> with comm.config_scope():
            ...     comm.bucket_mb = 4
            >>> comm.get_config('bucket_mb')
            4
        """
        outer = self._in_config_scope
        object.__setattr__(self, '_in_config_scope', True)
        try:
            yield
        finally:
            object.__setattr__(self, '_in_config_scope', outer)

    @property
    def within_config_scope(self) -> bool:
        """Whether a ``config_scope`` is active."""
        return self._in_config_scope

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get('_in_config_scope', False):
            self._configs[name] = value
        object.__setattr__(self, name, value)

    # --- timeline ----------------------------------------------------------------------------

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return a context that is shown on the timeline: ``with comm.span('augment'):``.

        The multi-node optimizer creates the spans ``'forward'``, ``'backward'``, ``'exchange'`` (or
        ``'broadcast'``) and ``'update'``. Without ``CHAINERMN_TIMELINE``, spans have no effect.

        Args:
            name: Name on the timeline.

        Example:
            >>> with comm.span('augment'):
            ...     batch = [(x[::-1], t) for x, t in train]
        """
        return contextlib.nullcontext()

    # --- groups ------------------------------------------------------------------------------

    @abc.abstractmethod
    def split(self, color: int, key: int) -> Self:
        """Split the ranks into new communicators (MPI_Comm_split, MPI section 7.4.2).

        Collective: every rank calls it.

        Args:
            color: Non-negative integer; ranks with the same color get the same communicator.
            key: Integer that orders the ranks in the new communicator. Ranks with the same key
                keep their relative order.

        Returns:
            A communicator of all ranks with the color of this rank. It has the same class and
            configuration as this communicator.

        Example:
            >>> node = comm.split(color=comm.inter_rank, key=comm.rank)  # the ranks of this node
            >>> node.size == comm.intra_size
            True
        """

    def new_group(self, ranks: Sequence[int]) -> Self | None:
        """Create a communicator of some of the ranks (MPI_Group_incl, MPI section 7.3.2).

        Collective: every rank of this communicator calls it, including ranks outside the group.

        Args:
            ranks: The ranks of the group, without duplicates, in their new order; the same list on
                all ranks.

        Returns:
            On the ranks of the group, a communicator with the same class and configuration, in
            which ``ranks[i]`` has rank ``i``. On all other ranks, ``None``.

        Example:
            >>> group = comm.new_group([0])
            >>> if group is not None:
            ...     print(group)
            <FlatCommunicator: rank 0 of 1, on node 0 of 1 as rank 0 of 1>
        """
        return _version7.new_group(self, ranks)

    def barrier(self) -> None:
        """Wait until every rank has called it. Collective: every rank calls it.

        Example:
            >>> if comm.rank == 0:
            ...     np.save('data.npy', np.arange(3))
            >>> comm.barrier()  # now the file exists
            >>> np.load('data.npy')
            array([0, 1, 2])
        """
        self.allgather_obj(None)

    def serve(self, answer: Callable[[int, np.ndarray], Sequence[Buffer]]) -> Service:
        """Start a thread on each rank that answers requests of the other ranks.

        Collective: every rank calls it. Requests are not collective: a rank can send one at any
        time, and gets an answer even while the other rank computes, sleeps or waits.

        Args:
            answer: Function that is called as ``answer(source, request)`` for each request to this
                rank. ``source`` is the rank that sent the request, and ``request`` is a flat uint8
                array. The function returns a list of C-ordered host arrays or bytes, which are
                concatenated. It runs in the thread, for one request at a time; requests of this
                rank to itself run in the calling thread. If the function raises an error, the rank
                that sent the request raises that error.

        Returns:
            A service. ``ask({rank: [array, ...], ...})`` sends requests to several ranks together
            and returns a dict of their answers by rank. Each answer is a flat uint8 array.
            ``close()`` declares that this rank sends no more requests and returns immediately. The
            rank keeps answering requests until every rank has called ``close()`` or has reached the
            end of its script.

        Raises:
            RuntimeError: If the MPI library does not support calls from several threads.

        Example:
            >>> squares = np.arange(10 * comm.rank, 10 * comm.rank + 10, dtype=np.uint8) ** 2
            >>> service = comm.serve(lambda source, request: [squares[request]])
            >>> service.ask({1: [np.array([2, 3], np.uint8)]})[1]  # 12 ** 2 and 13 ** 2
            array([144, 169], dtype=uint8)
            >>> service.close()
        """
        self._missing('serve')

    def refuse(self, operation: str, error: Exception) -> NoReturn:
        """Raise ``error`` on every rank, in place of this rank's next collective operation.

        Collective: the other ranks call any collective operation, or :meth:`refuse` as well. Use
        this method in functions that use a communicator, if an argument may be invalid on one rank
        only. Ranks without an error continue to their first operation, which raises the same error.

        Args:
            operation: Name of the failed operation, for the message.
            error: The error of this rank. Every rank raises an error of this type, or of its
                nearest built-in base class if some rank does not know the type. The message
                contains the message of ``error``.

        Example:
            >>> def mean_loss(comm, losses):
            ...     if not losses:
            ...         comm.refuse('mean_loss', ValueError('there are no losses'))
            ...     return comm.allreduce_obj(sum(losses) / len(losses)) / comm.size
            >>> mean_loss(comm, [0.5] if comm.rank == 0 else [])
            Traceback (most recent call last):
                ...
            ValueError: ...there are no losses...
        """
        raise error  # the ranks of this communicator have no way to compare their errors

    # --- arrays ------------------------------------------------------------------------------

    @abc.abstractmethod
    def send(self, data: Array | Sequence[Array], dest: int, tag: int) -> None:
        """Send an array, or a tuple or list of arrays, to one rank.

        Returns once the receiver has started to receive the data (synchronous mode, MPI section
        3.4).

        Args:
            data: Array of any shape, or a tuple or list of arrays, on host or device.
            dest: Rank of the receiver; not this rank.
            tag: Integer from 0 to 32767; the receiver passes the same tag.

        Raises:
            TypeError, ValueError: If an argument is invalid. A receiver that waits for this
                message raises the same error.

        Example:
            >>> if comm.rank == 0:
            ...     comm.send(np.arange(3), dest=1, tag=0)
            ... else:
            ...     x = comm.recv(source=0, tag=0)
        """

    @abc.abstractmethod
    def recv(self, source: int, tag: int) -> ReceivedArrays:
        """Receive an array, or a tuple of arrays, from one rank.

        Args:
            source: Rank of the sender, which calls :meth:`send` or :meth:`isend`.
            tag: The tag that the sender passes.

        Returns:
            A new array (or a tuple of arrays if a tuple or list was sent), with the sender's dtype
            and shape. It is on the current device if it was sent from a device and this process
            has CuPy; otherwise, it is on the host.

        Example:
            >>> if comm.rank == 0:
            ...     print(comm.recv(source=1, tag=0))
            ... else:
            ...     comm.send(np.arange(3), dest=0, tag=0)
            [0 1 2]
        """

    def isend(self, x: Array | Sequence[Array], dest: int, tag: int = 0) -> Request[Any]:
        """Start to send an array, or a tuple or list of arrays, without waiting (MPI_Isend).

        Several messages to one rank can be in flight, even with the same tag; they are received
        in the order in which they were sent. :meth:`recv` can also receive them.

        Args:
            x: Array, or a tuple or list of arrays, as for :meth:`send`. It is copied, so you can
                change it immediately.
            dest: Rank of the receiver; may be this rank.
            tag: Integer from 0 to 32767; the receiver passes the same tag.

        Returns:
            A request. ``wait()`` returns ``None``, without waiting for the receiver. ``test()``
            returns whether ``wait()`` would return immediately. Call ``wait()`` exactly once for
            each request.

        Raises:
            TypeError, ValueError: If an argument is invalid. A receiver that waits for this
                message raises the same error.

        Example:
            >>> neighbor = 1 - comm.rank
            >>> request = comm.isend(np.full(2, comm.rank), neighbor)
            >>> comm.recv(neighbor, tag=0)
            array([1, 1])
            >>> request.wait()
        """
        self._missing('isend')

    def irecv(self, source: int, tag: int = 0) -> Request[ReceivedArrays]:
        """Start to receive a message that was sent with ``isend`` or ``send``, without waiting.

        Args:
            source: Rank of the sender; may be this rank.
            tag: The tag that the sender passes.

        Returns:
            A request. ``wait()`` returns the result of :meth:`recv` or raises its error.
            ``test()`` returns whether ``wait()`` would return immediately. A large array is only
            transferred while this rank waits for or tests a request, or sends or receives another
            message. Until then, :meth:`send` on the other rank does not return. So if the sender
            calls :meth:`send` (not ``isend``) and then a collective, call ``wait()`` before that
            collective.

        Example:
            >>> neighbor = 1 - comm.rank
            >>> request = comm.irecv(neighbor)
            >>> comm.send(np.full(2, comm.rank), neighbor, tag=0)
            >>> request.wait()
            array([1, 1])
        """
        self._missing('irecv')

    def waitall(self, requests: Sequence[Request[_T]]) -> list[_T]:
        """Wait for requests returned by ``isend`` and ``irecv`` (MPI_Waitall).

        Args:
            requests: The requests.

        Returns:
            The results of their ``wait()`` methods, in the order of ``requests``.

        Raises:
            Exception: If a request failed. The first error is raised after waiting for all
                requests.

        Example:
            >>> neighbor = 1 - comm.rank
            >>> requests = [comm.irecv(neighbor), comm.isend(np.full(2, comm.rank), neighbor)]
            >>> comm.waitall(requests)
            [array([1, 1]), None]
        """
        self._missing('waitall')

    @abc.abstractmethod
    def bcast(self, x: _A | None, root: int = 0, max_buf_len: int | None = None) -> _A:
        """Broadcast an array from the root to all ranks (MPI_Bcast).

        Collective: every rank calls it.

        Args:
            x: On the root, an array of any shape. Ignored on the other ranks.
            root: The rank whose array is sent; the same on all ranks.
            max_buf_len: Ignored; arrays of any length are supported.

        Returns:
            On the root, ``x`` itself. On the other ranks, a new array of the same dtype and shape,
            which is on the current device if the root's array is on a device.

        Example:
            >>> comm.bcast(np.arange(3) if comm.rank == 0 else None)
            array([0, 1, 2])
        """

    @abc.abstractmethod
    def gather(self, x: _A, root: int = 0) -> tuple[_A, ...] | None:
        """Collect one array from each rank on the root (MPI_Gatherv).

        Collective: every rank calls it.

        Args:
            x: Array of any shape; the same dtype on all ranks.
            root: The rank that gets the arrays; the same on all ranks.

        Returns:
            On the root, a tuple with the arrays of all ranks, by rank. On the other ranks,
            ``None``.

        Example:
            >>> comm.gather(np.full(2, comm.rank))
            (array([0, 0]), array([1, 1]))
        """

    @abc.abstractmethod
    def allgather(self, x: _A) -> tuple[_A, ...]:
        """Collect one array from each rank on all ranks (MPI_Allgatherv).

        Collective: every rank calls it.

        Args:
            x: Array of any shape; the same dtype on all ranks.

        Returns:
            On every rank, a tuple with the arrays of all ranks, by rank.

        Example:
            >>> comm.allgather(np.arange(comm.rank + 1))  # of different lengths
            (array([0]), array([0, 1]))
        """

    @abc.abstractmethod
    def allreduce(self, x: _A, op: str = 'sum', out: _A | None = None) -> _A:
        """Combine the arrays of all ranks element by element (MPI_Allreduce).

        Collective: every rank calls it.

        Args:
            x: Array; the same dtype and shape on all ranks.
            op: ``'sum'``, ``'prod'``, ``'max'`` or ``'min'``. For bool arrays, sum and max mean
                "or", and prod and min mean "and".
            out: Array for the result, with the same dtype, shape and device as ``x``; it may be
                ``x`` itself. By default, a new array.

        Returns:
            ``out`` or a new array. It is bitwise identical on all ranks (except for NaN). float16
            is combined in float32 and rounded once.

        Example:
            >>> x = np.array([1, comm.rank])
            >>> comm.allreduce(x)
            array([2, 1])
            >>> comm.allreduce(x, 'max')
            array([1, 1])
        """

    def allreduce_many(self, xs: Sequence[_A], op: str = 'sum') -> tuple[_A, ...]:
        """Combine several arrays, with one all-reduce for all arrays of a dtype.

        Collective: every rank calls it. For many small arrays, it is faster than one
        :meth:`allreduce` per array.

        Args:
            xs: Tuple or list of arrays of any dtypes and shapes; the same dtypes and shapes on all
                ranks.
            op: See :meth:`allreduce`.

        Returns:
            A tuple of new arrays, in the order of ``xs``. They are bitwise identical on all ranks.

        Example:
            >>> comm.allreduce_many([np.ones(2), np.full((1, 3), comm.rank)])
            (array([2., 2.]), array([[1, 1, 1]]))
        """
        return _version7.allreduce_many(self, xs, op)

    def reduce(self, x: _A, op: str = 'sum', root: int = 0) -> _A | None:
        """Combine the arrays of all ranks on the root (MPI_Reduce).

        Collective: every rank calls it.

        Args:
            x: Array; the same dtype and shape on all ranks.
            op: See :meth:`allreduce`.
            root: The rank that gets the result; the same on all ranks.

        Returns:
            On the root, a new array. On the other ranks, ``None``.

        Example:
            >>> comm.reduce(np.array([1, comm.rank]))  # None on rank 1
            array([2, 1])
        """
        return _version7.reduce(self, x, op, root)

    def reduce_scatter(self, xs: Array | Sequence[Array], op: str = 'sum') -> Array:
        """Combine one array per rank over all ranks; return one to each rank (MPI_Reduce_scatter).

        Collective: every rank calls it.

        Args:
            xs: One array for each rank, by rank, all of one dtype, or an array whose first axis has
                length ``size``. ``xs[i]`` has the same shape on all ranks.
            op: See :meth:`allreduce`.

        Returns:
            On rank ``i``, a new array: ``xs[i]`` of all ranks combined.

        Example:
            >>> comm.reduce_scatter(np.array([[1, 2], [3, 4]]))  # array([6, 8]) on rank 1
            array([2, 4])
        """
        return _version7.reduce_scatter(self, xs, op)

    @abc.abstractmethod
    def alltoall(self, xs: Sequence[_A]) -> tuple[_A, ...]:
        """Send one array to each rank and get one from each rank (MPI_Alltoallv).

        Collective: every rank calls it.

        Args:
            xs: One array for each rank, by rank. The arrays may have any shapes, but all have the
                same dtype, on all ranks.

        Returns:
            On rank ``i``, a tuple with ``xs[i]`` of all ranks, by rank.

        Example:
            >>> comm.alltoall([np.array([comm.rank, 0]), np.array([comm.rank, 1])])
            (array([0, 0]), array([1, 0]))
        """

    @abc.abstractmethod
    def scatter(self, xs: Array | Sequence[Array] | None, root: int = 0) -> Array:
        """Send one array to each rank from the root (MPI_Scatterv).

        Collective: every rank calls it.

        Args:
            xs: On the root, a tuple or list of ``size`` arrays of one dtype and any shapes, or an
                array whose first axis has length ``size``. Ignored on the other ranks.
            root: The rank whose arrays are sent; the same on all ranks.

        Returns:
            On rank ``i``, ``xs[i]`` of the root.

        Example:
            >>> comm.scatter([np.arange(3), np.arange(5)] if comm.rank == 0 else None)
            array([0, 1, 2])
        """

    def multi_node_mean(self, x: _A) -> _A:
        """Average floating-point arrays over all ranks, element by element.

        Collective: every rank calls it.

        Args:
            x: Array of a floating-point dtype; the same dtype and shape on all ranks.

        Returns:
            A new array, which is bitwise identical on all ranks.

        Example:
            >>> comm.multi_node_mean(np.array([1.0, comm.rank]))
            array([1. , 0.5])
        """
        return _version7.multi_node_mean(self, x)

    # --- objects -----------------------------------------------------------------------------

    @abc.abstractmethod
    def send_obj(self, obj: Object, dest: int, tag: int = 0) -> None:
        """Send a picklable object to one rank.

        May return before the object is received.

        Args:
            obj: Any picklable object.
            dest: Rank of the receiver.
            tag: Integer from 0 to 32767; the receiver passes the same tag or none.

        Raises:
            Exception: If the object cannot be pickled. The receiver raises the same error.
            TypeError, ValueError: If ``dest`` or ``tag`` is invalid.

        Example:
            >>> if comm.rank == 0:
            ...     comm.send_obj({'epoch': 3}, dest=1)
            ... else:
            ...     state = comm.recv_obj(source=0)
        """

    @abc.abstractmethod
    def recv_obj(self, source: int, status: MPI.Status | None = None, tag: int = -1) -> Object:
        """Receive an object that was sent with ``send_obj``.

        Args:
            source: Rank of the sender, or ``mpi4py.MPI.ANY_SOURCE``.
            status: ``mpi4py.MPI.Status`` for the source and tag of the message, or ``None``.
            tag: The tag that the sender passes; by default any tag (-1 or ``mpi4py.MPI.ANY_TAG``).

        Returns:
            The object.

        Raises:
            Exception: If :meth:`send_obj` could not pickle the object.
            TypeError, ValueError: If ``source`` or ``tag`` is invalid.

        Example:
            >>> from mpi4py import MPI
            >>> if comm.rank == 0:
            ...     print(comm.recv_obj(source=MPI.ANY_SOURCE))
            ... else:
            ...     comm.send_obj({'epoch': 3}, dest=0)
            {'epoch': 3}
        """

    @abc.abstractmethod
    def bcast_obj(self, obj: _T | None, max_buf_len: int = 256 * 1024 * 1024, root: int = 0) -> _T:
        """Broadcast a picklable object from the root. Collective: every rank calls it.

        Args:
            obj: On the root, any picklable object, including ``None``. Ignored on the other ranks.
            max_buf_len: Ignored; objects of any size are supported.
            root: The rank whose object is sent; the same on all ranks.

        Returns:
            On the root, ``obj`` itself. On the other ranks, a copy.

        Example:
            >>> comm.bcast_obj({'lr': 0.1} if comm.rank == 0 else None)
            {'lr': 0.1}
        """

    @abc.abstractmethod
    def gather_obj(self, obj: _T, root: int = 0) -> list[_T] | None:
        """Collect one object from each rank on the root. Collective: every rank calls it.

        Args:
            obj: Any picklable object.
            root: The rank that gets the objects; the same on all ranks.

        Returns:
            On the root, a list with the objects of all ranks, by rank. On the other ranks,
            ``None``.

        Example:
            >>> comm.gather_obj(f'rank {comm.rank}')  # None on rank 1
            ['rank 0', 'rank 1']
        """

    def allgather_obj(self, obj: _T) -> list[_T]:
        """Collect one object from each rank on all ranks. Collective: every rank calls it.

        Args:
            obj: Any picklable object.

        Returns:
            On every rank, a list with the objects of all ranks, by rank.

        Example:
            >>> comm.allgather_obj(f'rank {comm.rank}')
            ['rank 0', 'rank 1']
        """
        return _version7.allgather_obj(self, obj)

    def scatter_obj(self, objs: Sequence[_T] | None, root: int = 0) -> _T:
        """Send one object to each rank from the root. Collective: every rank calls it.

        Args:
            objs: On the root, a sequence of ``size`` objects. Ignored on the other ranks.
            root: The rank whose objects are sent; the same on all ranks.

        Returns:
            On rank ``i``, ``objs[i]`` of the root.

        Example:
            >>> comm.scatter_obj(['a.txt', 'b.txt'] if comm.rank == 0 else None)
            'a.txt'
        """
        return _version7.scatter_obj(self, objs, root)

    @abc.abstractmethod
    def allreduce_obj(self, obj: _T, op: str = 'sum') -> _T:
        """Combine the objects of all ranks in the order of the ranks.

        Collective: every rank calls it.

        Args:
            obj: A picklable object.
            op: ``'sum'`` for ``+``, ``'prod'`` for ``*``, ``'max'`` or ``'min'``. ``'max'`` and
                ``'min'`` return NaN if any object is NaN, and compare arrays element by element.

        Returns:
            On every rank, ``obj_0 + obj_1 + ...``, or the result of the operation ``op``.

        Example:
            >>> comm.allreduce_obj(comm.rank + 1)
            3
            >>> comm.allreduce_obj(comm.rank + 1, 'max')
            2
        """

    # --- models ------------------------------------------------------------------------------

    @abc.abstractmethod
    def bcast_data(self, model: Model) -> None:
        """Copy the parameters of rank 0's model to the models of all ranks.

        Collective: every rank calls it. Persistent values (such as the statistics of batch
        normalization) are not changed; uninitialized parameters are skipped.

        Args:
            model: A ``chainer.Link`` with the same initialized parameters on all ranks.

        Example:
            >>> model = L.Linear(3, 2)  # with different random weights on each rank
            >>> comm.bcast_data(model)
            >>> comm.check_replicas(model)
        """

    def broadcast_data(self, model: Model) -> None:
        """Call ``bcast_data``, the newer name of this operation. Collective: every rank calls it.

        Args:
            model: See :meth:`bcast_data`.
        """
        self.bcast_data(model)

    @abc.abstractmethod
    def multi_node_mean_grad(self, model: Model, zero_fill: bool = False,
                             compression: Compression = None) -> None:
        """Replace each gradient of the model with its mean over all ranks, in place.

        Collective: every rank calls it. The gradients are then bitwise identical on all ranks.

        Args:
            model: A ``chainer.Link`` with the same parameters on all ranks.
            zero_fill: If true, an initialized parameter without a gradient gets a gradient of zero.
                If false, such a parameter is skipped, and it is an error if another rank has a
                gradient for it. Uninitialized parameters are always skipped.
            compression: ``None``, ``'fp16'``, ``'bf16'``, or a compressor with the same parameters
                on all ranks, which encodes the gradients of each rank;
                see :mod:`chainermn.communicators.compression`.

        Example:
            >>> model = L.Linear(3, 2)
            >>> for param in model.params():
            ...     param.grad = np.full_like(param.array, comm.rank)
            >>> comm.multi_node_mean_grad(model)
            >>> model.b.grad
            array([0.5, 0.5], dtype=float32)
        """

    def called_by(self, caller: Caller | str, update: Update = NO_UPDATE
                  ) -> AbstractContextManager[object]:
        """Return a context that names the caller of operations: ``comm.called_by('LogReport')``.

        The ranks compare the callers. If the callers differ, for example because an extension was
        added on one rank only, all ranks raise a ValueError that shows the callers. In nested
        contexts, only the outermost caller is compared.

        Args:
            caller: Name of the caller, the same on all ranks.
            update: The update of an optimizer that averages gradients. The ranks compare how many
                updates have begun since gradients were last averaged.

        Example:
            >>> with comm.called_by('MyExtension'):
            ...     n_examples = comm.allreduce_obj(len(train))
        """
        return contextlib.nullcontext()

    def mean_queue(self) -> GradientQueue:
        """Return the queue that averages gradients in the background.

        Collective: every rank calls it.

        Returns:
            The queue, which is the same object in each call. Its messages are independent of other
            operations. Keep a reference to the communicator while you use the queue.

        Raises:
            ValueError: If the communicator cannot average gradients in the background.

        Example:
            >>> queue = comm.mean_queue()
            >>> means = queue.submit({'/W': np.full(2, comm.rank, np.float32)})
            >>> queue.wait()
            >>> means
            [array([0.5, 0.5], dtype=float32)]
        """
        raise ValueError(f'{type(self).__name__} averages gradients in its own '
                         'multi_node_mean_grad, which cannot run during the backward pass. Use '
                         'overlap=False.')

    def check_replicas(self, model: Model) -> None:
        """Check that the parameters of a model are bitwise identical on all ranks.

        Collective: every rank calls it. In debug mode (``chainer.set_debug(True)`` or
        ``CHAINERMN_DEBUG=1``), the multi-node optimizer calls it after every 100th update, or after
        every k-th update with ``CHAINERMN_DEBUG_EVERY=k``.

        Args:
            model: A ``chainer.Link``.

        Raises:
            ValueError: On all ranks, if a parameter differs. The message shows the first such
                parameter, and which ranks have identical values.

        Example:
            >>> model = L.Linear(3, 2, initialW=comm.rank)
            >>> comm.check_replicas(model)
            Traceback (most recent call last):
                ...
            ValueError: ...
        """
        debug_checks.check_replicas(model, self.allgather_obj)

    def allreduce_grad(self, model: Model, zero_fill: bool = False) -> None:
        """Call ``multi_node_mean_grad``, the newer name of this operation.

        Collective: every rank calls it.

        .. deprecated:: v7.0.0

        Args:
            model: See :meth:`multi_node_mean_grad`.
            zero_fill: See :meth:`multi_node_mean_grad`.
        """
        warnings.warn('allreduce_grad() is deprecated; call multi_node_mean_grad() instead.',
                      DeprecationWarning, stacklevel=2)
        self.multi_node_mean_grad(model, zero_fill)

    def finalize(self) -> None:  # noqa: B027  (some communicators hold no resources)
        """Free the resources of the communicator. Collective: every rank calls it, once.

        Do not use the communicator afterwards. If you create only a few communicators, you need
        not call this method.

        Example:
            >>> group = comm.split(color=0, key=comm.rank)
            >>> group.finalize()
        """
