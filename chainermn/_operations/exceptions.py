"""The exceptions of this package, and their base class."""
from __future__ import annotations

from collections.abc import Sequence


class ChainerMNError(Exception):
    """The base class of the exceptions that ChainerMN defines.

    Each of them is also a built-in exception, such as ValueError. Invalid arguments raise built-in
    exceptions. To catch every error of a collective, catch ``Exception``, because an error of one
    rank is raised with its original type on all ranks.

    Example:
        >>> try:
        ...     comm.allreduce(np.ones(comm.rank))  # of different shapes
        ... except chainermn.ChainerMNError as error:
        ...     print(type(error).__name__)
        CollectiveMismatchError
    """

    __module__ = 'chainermn'  # where users import it from


class CollectiveMismatchError(ChainerMNError, ValueError):
    """Ranks called different operations, or one operation with arguments that do not match.

    All ranks raise it, with the same text, before any data is sent.

    Attributes:
        calls: The call of each rank, as text.
        call_sites: The call site of each rank, such as ``train.py:8``; ``''`` if unknown.

    Example:
        >>> try:
        ...     comm.gather_obj('x', root=comm.rank)  # with different roots
        ... except chainermn.CollectiveMismatchError as error:
        ...     print(error.calls)
        ('gather_obj root=0', 'gather_obj root=1')
    """

    __module__ = 'chainermn'
    calls: tuple[str, ...] = ()
    call_sites: tuple[str, ...] = ()

    @classmethod
    def of(cls, message: str, calls: Sequence[object], sites: Sequence[str] = ()
           ) -> CollectiveMismatchError:
        error = cls(message)
        error.calls = tuple(map(str, calls))
        error.call_sites = tuple(site.rpartition('called at ')[2] for site in sites) or (
            ('',) * len(calls))
        return error


class DataSizeError(ChainerMNError, RuntimeError):
    """The dataset passed to ``scatter_dataset`` does not fit into the memory of a node."""

    __module__ = 'chainermn'


class ShardError(ChainerMNError, RuntimeError):
    """A shard, or a sample in it, cannot be read. All ranks raise it, with the name of the file.

    Example:
        >>> with open('broken.npz', 'w') as file:
        ...     _ = file.write('not an archive')
        >>> try:
        ...     chainermn.iterators.ShardedIterator(['broken.npz'], 8, comm)
        ... except chainermn.iterators.ShardError as error:
        ...     print('not an archive' in str(error) or 'BadZipFile' in str(error))
        True
    """

    __module__ = 'chainermn.iterators'
