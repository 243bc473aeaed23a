"""The interface of every communicator: what each rank gives and what each rank gets.

The operations are named after the functions of MPI (MPI standard, chapters 3 "Point-to-Point" and
6 "Collective Communication").  An operation whose name ends in ``_obj`` takes any picklable Python
object; the others take arrays.  ``numpy`` and ``cupy`` arrays are both meant by "array".

Every collective operation begins with an agreement: all ranks compare what they are about to do.
If a rank was refused (a bad argument), or calls another operation, or with another root, operation,
dtype or shape where these must be equal, then **every rank raises the same error**, which shows
what each rank called, and no data moves.

A communicator is for one thread at a time.  Messages between two ranks arrive in the order in which
they are sent; large objects and arrays are sent whole only while the other rank receives them.
"""
from __future__ import annotations

import abc
import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from mpi4py import MPI


class CommunicatorBase(metaclass=abc.ABCMeta):
    """What all communicators can do.

    A communicator is a group of ranks (processes) numbered from 0 to ``size - 1``.  Make one with
    :func:`chainermn.create_communicator`.

    Attribute assignments inside ``with self.config_scope():`` become configuration items, to be
    read by :meth:`get_config`.
    """

    _configs: dict[str, Any]
    _in_config_scope: bool

    def __init__(self) -> None:
        object.__setattr__(self, '_configs', {})
        object.__setattr__(self, '_in_config_scope', False)

    @classmethod  # noqa: B027  (most communicators need nothing)
    def check_requirements(cls) -> None:
        """Raises RuntimeError if this process lacks what the communicator needs."""

    @classmethod
    def check_grad_dtype(cls, dtype: Any) -> Any:
        """Returns a dtype in which the communicator can exchange all gradients, or raises."""
        raise ValueError('allreduce_grad_dtype is for pure_nccl; the other communicators exchange '
                         'each gradient in its own dtype')

    # --- who and where -----------------------------------------------------------------------

    @property
    def mpi_comm(self) -> MPI.Intracomm:
        """The mpi4py communicator it was made from, for messages of the program itself."""
        raise AttributeError(f'{type(self).__name__} was not made from an mpi4py communicator')

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """Number of this process among the ranks of the communicator, from 0."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @property
    @abc.abstractmethod
    def intra_rank(self) -> int:
        """Number of this process among the ranks of its node, from 0."""

    @property
    @abc.abstractmethod
    def intra_size(self) -> int:
        """Number of ranks on this node."""

    @property
    @abc.abstractmethod
    def inter_rank(self) -> int:
        """Number of this node, from 0; nodes are ordered by the lowest rank they hold."""

    @property
    @abc.abstractmethod
    def inter_size(self) -> int:
        """Number of nodes."""

    @property
    def can_overlap(self) -> bool:
        """Whether :meth:`multi_node_mean_grad_async` can run while the caller computes."""
        return False

    @property
    def has_nccl(self) -> bool:
        """Whether arrays on a device can travel by NCCL."""
        return False

    def __repr__(self) -> str:
        return (f'<{type(self).__name__}: rank {self.rank} of {self.size}, on node '
                f'{self.inter_rank} of {self.inter_size} as rank {self.intra_rank} of '
                f'{self.intra_size}>')

    def __deepcopy__(self, memo: Any) -> CommunicatorBase:
        """A copy of what holds a communicator, such as a model, shares it."""
        return self

    # --- configuration -----------------------------------------------------------------------

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        """Sets one configuration item of this communicator.

        Every rank should set the same value.  ``batched_copy`` (bool) says whether the GPU copies
        all gradients in and out of the exchange buffer with one kernel launch.  ``timeout``
        (seconds) is how long an operation may take before the job is ended with a report of what
        each rank is doing; 0 allows any time, ``None`` what ``CHAINERMN_TIMEOUT`` says.

        Args:
            name: Name of the item.
            value: Its new value.

        Raises:
            ValueError: If the communicator has no such item.
            TypeError: If other keyword arguments are given.
        """
        if kwargs:
            raise TypeError(f'set_config got unexpected keyword arguments {sorted(kwargs)}')
        if name != 'batched_copy':
            raise ValueError(f'{type(self).__name__} has no configuration item {name!r}; it has '
                             f'{sorted(self._configs)}')
        with self.config_scope():
            self.batched_copy = bool(value)

    def get_config(self, name: str | None = None) -> Any:
        """Returns the value of a configuration item, or a dict of all of them for ``None``.

        Raises:
            KeyError: If the communicator has no such item.
        """
        if name is None:
            return dict(self._configs)
        return self._configs[name]

    @contextlib.contextmanager
    def config_scope(self) -> Iterator[None]:
        """Context in which an attribute assignment also sets the configuration item so named."""
        outer = self._in_config_scope
        object.__setattr__(self, '_in_config_scope', True)
        try:
            yield
        finally:
            object.__setattr__(self, '_in_config_scope', outer)

    @property
    def within_config_scope(self) -> bool:
        """Whether the code runs inside :meth:`config_scope`."""
        return self._in_config_scope

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get('_in_config_scope', False):
            self._configs[name] = value
        object.__setattr__(self, name, value)

    # --- timeline ----------------------------------------------------------------------------

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Names what runs inside ``with comm.span('augment'):`` on the timeline.

        The multi-node optimizer does so with ``'forward'``, ``'backward'``, ``'exchange'`` (or
        ``'broadcast'``) and ``'update'``.  Without ``CHAINERMN_TIMELINE`` nothing happens.
        """
        return contextlib.nullcontext()

    # --- groups ------------------------------------------------------------------------------

    @abc.abstractmethod
    def split(self, color: int, key: int) -> Any:
        """Splits the ranks into new communicators (MPI_Comm_split, MPI section 7.4.2).

        Collective: every rank calls it.

        Args:
            color: Ranks that pass the same number, 0 or above, end in the same communicator.
            key: Orders the ranks within it; ties are ordered by the old rank.

        Returns:
            A communicator of the same class and configuration whose members are the ranks of this
            rank's color.
        """

    @abc.abstractmethod
    def new_group(self, ranks: Sequence[int]) -> Any:
        """Makes a communicator of some of the ranks (MPI_Group_incl, MPI section 7.3.2).

        Collective: every rank of this communicator calls it, also those outside the group.

        Args:
            ranks: The ranks of the group, each once, in the order that they will have in it; the
                same on all ranks.

        Returns:
            On the ranks of the group a communicator of the same class and configuration, in which
            rank ``ranks[i]`` has the number ``i``.  ``None`` on the others.
        """

    @abc.abstractmethod
    def barrier(self) -> None:
        """Returns once every rank has called it.  Collective: every rank calls it."""

    @abc.abstractmethod
    def serve(self, answer: Callable[[int, Any], Sequence[Any]]) -> Any:
        """Starts a thread on each rank that answers requests of the other ranks.

        Collective: every rank calls it.  Asking is not: a rank asks when it likes, and is answered
        whether the rank that it asks computes, sleeps or waits.

        Args:
            answer: Called as ``answer(source, request)`` for each request to this rank, with the
                rank that asks and a flat uint8 array; returns a list of C-ordered host arrays or
                bytes, which are joined.  It runs in the thread, for one request at a time, or, for
                what this rank asks itself, in the thread that asks.  What it raises is raised on
                the rank that asks.

        Returns:
            A service.  ``ask({rank: [array, ...], ...})`` sends a request to some ranks at once
            and returns their answers, each a flat uint8 array, by rank.  ``close()`` says that
            this rank will not ask any more, and returns at once; the rank goes on answering until
            every rank has said so or has reached the end of the program.

        Raises:
            RuntimeError: If the MPI library cannot be called from several threads at once.
        """

    @abc.abstractmethod
    def refuse(self, verb: str, error: Exception) -> NoReturn:
        """Raises ``error`` on every rank, in place of this rank's next collective operation.

        Collective: the other ranks call any collective operation, or :meth:`refuse` as well.  For
        functions built on communicators that find a bad argument on one rank only: the ranks
        without an error go on to their first operation, which raises the same error there.

        Args:
            verb: What was refused, for the message.
            error: The reason.  Every rank raises an error of its type (where all ranks know it,
                otherwise of its nearest built-in base) whose message contains its message.
        """

    @abc.abstractmethod
    def agree_to_join(self, number: int) -> tuple[int, ...]:
        """Exchanges what the ranks say in :func:`chainermn.join`.  Collective: every rank calls it.

        Args:
            number: An integer.

        Returns:
            The numbers of all ranks, by rank.
        """

    @abc.abstractmethod
    def said_in_join(self, error: BaseException) -> tuple[int | None, ...] | None:
        """Says whether all ranks raised this error, and what they said in :func:`chainermn.join`.

        Returns:
            ``None`` if it is not an error of the agreement of this communicator.  Otherwise the
            number of each rank, by rank, ``None`` for those that called something else; or nothing
            if a rank was refused or had ended.
        """

    # --- arrays ------------------------------------------------------------------------------

    @abc.abstractmethod
    def send(self, data: Any, dest: int, tag: int) -> None:
        """Sends an array, or a tuple or list of arrays, to one rank.

        Returns once the receiver has begun to receive it (synchronous mode, MPI section 3.4).

        Args:
            data: Array of any shape, or a tuple or list of arrays, on host or device.
            dest: Rank of the receiver; not this rank.
            tag: Number from 0 to 32767 that the receiver asks for.

        Raises:
            TypeError, ValueError: If an argument is refused.  A receiver that waits for this
                message raises the same error.
        """

    @abc.abstractmethod
    def recv(self, source: int, tag: int) -> Any:
        """Receives what :meth:`send` sent on rank ``source`` with the same tag.

        Returns:
            A new array (or a tuple of arrays where a tuple or list was sent), with the dtype and
            shape that were sent.  It is on the current device if it was sent from a device and
            this process has CuPy, else on the host.
        """

    @abc.abstractmethod
    def isend(self, x: Any, dest: int, tag: int = 0) -> Any:
        """Begins to send an array, or a tuple or list of arrays, and returns at once (MPI_Isend).

        Several messages may be on their way to one rank, with the same tag too; they are received
        in the order in which they were sent.  :meth:`recv` receives them as well.

        Args:
            x: As for :meth:`send`.  It is copied, so it may be written at once.
            dest: Rank of the receiver; this rank too.
            tag: Number from 0 to 32767 that the receiver asks for.

        Returns:
            A request.  ``wait()`` returns ``None``; it does not wait for the receiver.  ``test()``
            returns whether ``wait()`` would return at once.  Wait for each request, once.

        Raises:
            TypeError, ValueError: If an argument is refused.  A receiver that waits for this
                message raises the same error.
        """

    @abc.abstractmethod
    def irecv(self, source: int, tag: int = 0) -> Any:
        """Begins to receive what :meth:`isend` or :meth:`send` sends, and returns at once.

        Args:
            source: Rank of the sender; this rank too.
            tag: The tag with which it was or will be sent.

        Returns:
            A request.  ``wait()`` returns what :meth:`recv` would, and raises what that would.
            ``test()`` returns at once and says whether ``wait()`` would do so too.  A large array
            is on its way only while this rank is inside one of them, of any request, or sends or
            receives something else; a :meth:`send` of it ends no earlier.  So wait before a
            collective call that the sender makes after its :meth:`send` (not ``isend``).
        """

    @abc.abstractmethod
    def waitall(self, requests: Sequence[Any]) -> list[Any]:
        """Waits for requests of :meth:`isend` and :meth:`irecv` (MPI_Waitall).

        Returns:
            A list with what the ``wait()`` of each returns, in the order of ``requests``.

        Raises:
            Exception: The first of the errors that they raise, once all have been waited for.
        """

    @abc.abstractmethod
    def send_activation(self, data: Any, dest: int, tag: int, needs_gradient: bool) -> Any:
        """Sends what :func:`chainermn.functions.send` sends.

        :meth:`send` that is marked, so that a gradient is never taken for data.  :meth:`recv`
        receives it, too.

        Args:
            data: Array, or a tuple or list of arrays.
            dest: Rank of the receiver; not this rank.
            tag: Number that the receiver asks for.
            needs_gradient: Whether :meth:`recv_gradient` will be called.

        Returns:
            An object for :meth:`recv_gradient`.  Its attribute ``needs_gradient`` is the argument.

        Raises:
            ValueError: If the two ranks wait for each other; the error on both ranks names both
                calls.
        """

    @abc.abstractmethod
    def recv_activation(self, source: int, tag: int) -> tuple[Any, Any]:
        """Receives what :meth:`send_activation`, or :meth:`send`, sent.

        Returns:
            The array, or a tuple of arrays; and an object for :meth:`send_gradient`, whose
            attribute ``needs_gradient`` says whether the sender calls :meth:`recv_gradient`.

        Raises:
            ValueError: If a gradient came, or if the two ranks wait for each other.
        """

    @abc.abstractmethod
    def send_gradient(self, gradients: Any, activation: Any) -> None:
        """Sends the gradient of what :meth:`recv_activation` received, if its sender needs it.

        Args:
            gradients: Array, or a tuple of arrays.
            activation: From :meth:`recv_activation`.

        Raises:
            ValueError: If the two ranks wait for each other.
        """

    @abc.abstractmethod
    def recv_gradient(self, activation: Any) -> Any:
        """Receives the gradient of what :meth:`send_activation` sent.

        Args:
            activation: From :meth:`send_activation`, with ``needs_gradient`` true.

        Returns:
            The array, or a tuple of arrays.

        Raises:
            ValueError: If data came, or if the two ranks wait for each other.
        """

    @abc.abstractmethod
    def bcast(self, x: Any, root: int = 0, max_buf_len: int | None = None) -> Any:
        """Broadcasts an array from the root to all ranks (MPI_Bcast).

        Collective: every rank calls it.

        Args:
            x: On the root, an array of any shape.  Ignored on the other ranks.
            root: The rank whose array is sent; the same on all ranks.
            max_buf_len: Ignored; arrays of any length travel in one piece.

        Returns:
            On the root ``x`` itself.  On the others a new array of the same dtype and shape, on the
            current device if the root's is on a device.
        """

    @abc.abstractmethod
    def gather(self, x: Any, root: int = 0) -> tuple[Any, ...] | None:
        """Collects one array from each rank on the root (MPI_Gatherv).

        Collective: every rank calls it.

        Args:
            x: Array.  Shapes may differ between the ranks, dtypes may not.
            root: The rank that gets the arrays; the same on all ranks.

        Returns:
            On the root a tuple with the array of each rank, by rank.  ``None`` elsewhere.
        """

    @abc.abstractmethod
    def allgather(self, x: Any) -> tuple[Any, ...]:
        """Collects one array from each rank on all ranks (MPI_Allgatherv).

        Collective: every rank calls it.

        Args:
            x: Array.  Shapes may differ between the ranks, dtypes may not.

        Returns:
            On every rank a tuple with the array of each rank, by rank.
        """

    @abc.abstractmethod
    def allreduce(self, x: Any, op: str = 'sum', out: Any = None) -> Any:
        """Combines the arrays of all ranks element by element (MPI_Allreduce).

        Collective: every rank calls it.

        Args:
            x: Array; the same dtype and shape on all ranks.
            op: ``'sum'``, ``'prod'``, ``'max'`` or ``'min'``.  For bool arrays sum and max mean
                "or", prod and min mean "and".
            out: Where to put the result: an array of the same dtype and shape, on host or device
                as ``x``, which it may be itself.  By default a new array.

        Returns:
            On every rank ``out``, or a new array, with the same bits (but for those of a NaN).
            float16 is combined in float32 and rounded once.
        """

    @abc.abstractmethod
    def allreduce_many(self, xs: Sequence[Any], op: str = 'sum') -> tuple[Any, ...]:
        """Combines several arrays at once: one exchange for all arrays of a dtype.

        Collective: every rank calls it.  For many small arrays it is faster than
        :meth:`allreduce` of one after another.

        Args:
            xs: Tuple or list of arrays of any dtypes and shapes; the same ones on all ranks.
            op: As for :meth:`allreduce`.

        Returns:
            On every rank a tuple of new arrays with the same bits, in the order of ``xs``.
        """

    @abc.abstractmethod
    def reduce(self, x: Any, op: str = 'sum', root: int = 0) -> Any:
        """Combines the arrays of all ranks on the root (MPI_Reduce).

        Collective: every rank calls it.

        Args:
            x: Array; the same dtype and shape on all ranks.
            op: As for :meth:`allreduce`.
            root: The rank that gets the result; the same on all ranks.

        Returns:
            On the root a new array.  ``None`` elsewhere.
        """

    @abc.abstractmethod
    def reduce_scatter(self, xs: Any, op: str = 'sum') -> Any:
        """Combines one array for each rank, and gives each rank its own (MPI_Reduce_scatter).

        Collective: every rank calls it.

        Args:
            xs: One array for each rank, by rank, all of one dtype, or an array whose first axis has
                length ``size``.  Those meant for one rank have the same shape on all ranks.
            op: As for :meth:`allreduce`.

        Returns:
            A new array, to which the arrays that all ranks meant for this rank combine.
        """

    @abc.abstractmethod
    def alltoall(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        """Sends one array to each rank and gets one from each rank (MPI_Alltoallv).

        Collective: every rank calls it.

        Args:
            xs: One array for each rank, by rank, all of one dtype, the same on all ranks.  Shapes
                are free.

        Returns:
            A tuple with the array that each rank meant for this rank, by rank.
        """

    @abc.abstractmethod
    def scatter(self, xs: Any, root: int = 0) -> Any:
        """Sends one array to each rank from the root (MPI_Scatterv).

        Collective: every rank calls it.

        Args:
            xs: On the root, a tuple or list of ``size`` arrays of one dtype and any shapes, or an
                array whose first axis has length ``size``.  Ignored on the other ranks.
            root: The rank whose arrays are sent; the same on all ranks.

        Returns:
            On every rank the array (or the row) with the number of its rank.
        """

    @abc.abstractmethod
    def multi_node_mean(self, x: Any) -> Any:
        """Means of floating-point arrays over all ranks, element by element.

        Collective: every rank calls it.

        Args:
            x: Array of a floating-point dtype; the same dtype and shape on all ranks.

        Returns:
            On every rank a new array with the same bits.
        """

    # --- objects -----------------------------------------------------------------------------

    @abc.abstractmethod
    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends a picklable object to one rank.  May return before it is received.

        Args:
            obj: Any picklable object.
            dest: Rank of the receiver.
            tag: Number from 0 to 32767 that the receiver may ask for.

        Raises:
            Exception: What pickling raises.  The receiver raises the same error.
            TypeError, ValueError: If there is no such rank or tag.
        """

    @abc.abstractmethod
    def recv_obj(self, source: int, status: Any = None, tag: int = -1) -> Any:
        """Receives what :meth:`send_obj` sent.

        Args:
            source: Rank of the sender, or ``mpi4py.MPI.ANY_SOURCE``.
            status: ``mpi4py.MPI.Status`` that gets source and tag of the message, or ``None``.
            tag: The tag asked for; any by default (``mpi4py.MPI.ANY_TAG``).

        Returns:
            The object.

        Raises:
            Exception: What :meth:`send_obj` raised because it could not pickle the object.
            TypeError, ValueError: If there is no such rank or tag.
        """

    @abc.abstractmethod
    def bcast_obj(self, obj: Any, max_buf_len: int = 256 * 1024 * 1024, root: int = 0) -> Any:
        """Broadcasts a picklable object from the root.  Collective: every rank calls it.

        Args:
            obj: On the root, any picklable object, ``None`` too.  Ignored on the other ranks.
            max_buf_len: Ignored; objects of any size travel.
            root: The rank whose object is sent; the same on all ranks.

        Returns:
            On the root ``obj`` itself, on the others a copy.
        """

    @abc.abstractmethod
    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Collects one object from each rank on the root.  Collective: every rank calls it.

        Returns:
            On the root a list with the object of each rank, by rank.  ``None`` elsewhere.
        """

    @abc.abstractmethod
    def allgather_obj(self, obj: Any) -> list[Any]:
        """Collects one object from each rank on all ranks.  Collective: every rank calls it.

        Returns:
            On every rank a list with the object of each rank, by rank.
        """

    @abc.abstractmethod
    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        """Sends one object to each rank from the root.  Collective: every rank calls it.

        Args:
            objs: On the root, a sequence of ``size`` objects.  Ignored on the other ranks.
            root: The rank whose objects are sent; the same on all ranks.

        Returns:
            On every rank the object with the number of its rank.
        """

    @abc.abstractmethod
    def allreduce_obj(self, obj: Any, op: str = 'sum') -> Any:
        """Combines the objects of all ranks, by rank.  Collective: every rank calls it.

        Args:
            obj: A picklable object.
            op: ``'sum'`` for ``+``, ``'prod'`` for ``*``, ``'max'`` or ``'min'``.

        Returns:
            On every rank ``obj_0 + obj_1 + ...``, and likewise for the other operations.
        """

    # --- models ------------------------------------------------------------------------------

    @abc.abstractmethod
    def bcast_data(self, model: Any) -> None:
        """Copies the parameters of rank 0's model into the models of all ranks.

        Collective: every rank calls it.  Persistent values (such as the statistics of batch
        normalization) stay as they are; parameters that are not initialized yet are skipped.

        Args:
            model: A ``chainer.Link`` with the same initialized parameters on all ranks.
        """

    def broadcast_data(self, model: Any) -> None:
        """The older name of :meth:`bcast_data`.  Collective: every rank calls it."""
        self.bcast_data(model)

    @abc.abstractmethod
    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False,
                             compression: Any = None) -> None:
        """Replaces each gradient of the model by its mean over all ranks, in place.

        Collective: every rank calls it.  Afterwards the gradients have the same bits everywhere.

        Args:
            model: A ``chainer.Link`` with the same parameters on all ranks.
            zero_fill: If true, an initialized parameter without a gradient counts as one whose
                gradient is zero.  If false it is skipped, and it is an error if some rank has a
                gradient for it.  Parameters that are not initialized are always skipped.
            compression: ``None``, ``'fp16'``, ``'bf16'``, or a compressor, with the same parameters
                on all ranks, through which the gradients of each rank go;
                see :mod:`chainermn.communicators.compression`.
        """

    def at_update(self, number: int, since_last: int) -> AbstractContextManager[None]:
        """Lets :meth:`multi_node_mean_grad` compare at which update of an optimizer each rank is.

        Inside ``with comm.at_update(...):`` it raises a ValueError on all ranks if ``since_last``
        is not equal on all of them.  The multi-node optimizer uses it.

        Args:
            number: The update, for the error.
            since_last: How many updates this rank has begun since the last exchange, this one
                included.
        """
        return contextlib.nullcontext()

    def multi_node_mean_grad_async(self, model: Any, zero_fill: bool = False,
                                   compression: Any = None) -> Any:
        """Starts :meth:`multi_node_mean_grad` and returns at once.

        Collective: every rank calls it.  Only where :attr:`can_overlap` is true.

        Returns:
            An object whose ``wait()`` returns once the gradients are means.  Until then neither
            they nor the model may be touched.
        """
        raise ValueError(f'{type(self).__name__} cannot exchange gradients in the background; '
                         'pure_nccl can.')

    def mean_queue(self) -> Any:
        """Returns what averages lists of arrays over all ranks while the caller computes.

        Collective: every rank calls it.  Each call returns the same queue, of this communicator.
        What is exchanged there and what the caller exchanges meanwhile are not confused.

        Returns:
            An object with

            - ``agree(model, zero_fill, compression)``: Collective.  The gradients of the model by
              path, once all ranks are known to have the like; arguments and errors are those of
              :meth:`multi_node_mean_grad`.
            - ``put(arrays, compression=None)``: Begins to average arrays, by path, and returns an
              array for the mean of each.  The ranks put the same arrays in the same order, but
              when they like: none waits here for another.
            - ``wait()``: Returns once all that was put is averaged.
            - ``pending``: Whether something was put for which nobody has waited yet.
            - ``check(model)``: In debug mode, raises if a gradient is not finite, as
              :meth:`multi_node_mean_grad` does.
            - ``can_hide``: Whether it can run beside computing: over a network, on a device, or on
              a core that no rank of this one node needs; the same on all ranks.
            - ``cancel()``: Collective.  Forgets what was put, of which the ranks may have put more
              and less.
        """
        raise ValueError(f'{type(self).__name__} has no queue for means')

    def check_replicas(self, model: Any) -> None:  # noqa: B027  (others have none to compare)
        """Compares the parameters of a model, bit by bit.  Collective: every rank calls it.

        In debug mode (``chainer.set_debug(True)`` or ``CHAINERMN_DEBUG=1``) the multi-node
        optimizer does so after every 100th update, or every k-th with ``CHAINERMN_DEBUG_EVERY=k``.

        Args:
            model: A ``chainer.Link``.

        Raises:
            ValueError: On all ranks, if a parameter differs; the first one is named, with the
                ranks that have the same.
        """

    def allreduce_grad(self, model: Any, zero_fill: bool = False) -> None:
        """The older name of :meth:`multi_node_mean_grad`.  Collective: every rank calls it.

        .. deprecated:: v7.0.0
        """
        warnings.warn('allreduce_grad() is deprecated; call multi_node_mean_grad() instead.',
                      DeprecationWarning, stacklevel=2)
        self.multi_node_mean_grad(model, zero_fill)

    def finalize(self) -> None:  # noqa: B027  (a communicator may hold nothing)
        """Frees what the communicator holds.  Collective: every rank calls it, once.

        The communicator must not be used afterwards.  Programs that make only a few communicators
        need not call it.
        """
