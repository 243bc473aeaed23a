"""Operations that use only methods of ChainerMN 7, for communicators that define no others.

They are the defaults of :class:`~chainermn.communicators.communicator_base.CommunicatorBase` and
pass only arguments that exist in version 7.
"""
from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import chainer
import numpy as np

from chainermn._collectives.activations import Activation
from chainermn._consistency.mismatch import RemoteError, remote_error
from chainermn._operations import common_error
from chainermn._operations.arguments import is_integer
from chainermn._operations.on_all_ranks import HasChannel, raise_together
from chainermn._transport.elementwise import check_op
from chainermn._types import Array, Arrays, Model, Object, ReceivedArrays, SameArray

#: Operations that version 7 does not have, and the methods of version 7 that their defaults call. A
#: class that overrides one of these methods, for example to count, log or compress, gets the
#: default, because it expects its method to be called wherever version 7 called it.
CALLED: dict[str, tuple[str, ...]] = {
    'allgather_obj': ('gather_obj', 'bcast_obj'),
    'scatter_obj': ('send_obj', 'recv_obj'),
    'allreduce_many': ('allreduce', 'allgather'),
    'multi_node_mean': ('allreduce',),
    'reduce': ('gather',),
    'reduce_scatter': ('alltoall',),
    'new_group': ('split',),
    'mean_queue': ('multi_node_mean_grad',),
}
#: For each method of version 7, the methods of ``Channel`` that call it.
_IN_CHANNEL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(['send', 'recv'], (
        'send_activation', 'recv_activation', 'send_gradient', 'recv_gradient')),
    'multi_node_mean_grad': ('mean_grad_shards',),
}

_T = TypeVar('_T')
_Comm = TypeVar('_Comm', bound='Version7')

#: The tag of this module's object messages; user code is unlikely to use it.
_TAG = 31547
_UFUNCS = {'sum': 'add', 'prod': 'multiply', 'max': 'maximum', 'min': 'minimum'}
#: Marks a message whose sender needs no gradient. The next bit tells whether the data is a tuple.
_MARK = np.unpackbits(np.frombuffer(b'\x93\x5a\xc1\x6e', np.uint8))


class Version7(HasChannel, Protocol):
    """The methods that these operations call: methods of version 7 and some of these operations."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def split(self: _Comm, color: int, key: int) -> _Comm: ...
    def finalize(self) -> None: ...
    def send(self, data: Arrays, dest: int, tag: int) -> None: ...
    def recv(self, source: int, tag: int) -> ReceivedArrays: ...
    def alltoall(self, xs: Sequence[Array]) -> tuple[Array, ...]: ...
    def gather(self, x: Array, root: int = 0) -> tuple[Array, ...] | None: ...
    def allgather(self, x: Array) -> tuple[Array, ...]: ...
    def allreduce(self, x: Array) -> Array: ...
    def send_obj(self, obj: Object, dest: int, tag: int) -> None: ...
    def recv_obj(self, source: int, *, tag: int) -> Object: ...
    def bcast_obj(self, obj: Object) -> Object: ...
    def gather_obj(self, obj: Object) -> list[Object] | None: ...
    def allgather_obj(self, obj: Object) -> list[Object]: ...
    def bcast(self, x: Array, *, root: int) -> Array: ...
    def multi_node_mean_grad(self, model: Model, zero_fill: bool) -> None: ...


def overrides(cls: type, name: str) -> bool:
    """Return whether a class has a method of this name that is not from this package."""
    method = getattr(cls, name, None)
    while method is not None:
        # Look at the globals, because functools.wraps copies __module__, and user code may have
        # replaced a method in a class of this package.
        module = getattr(method, '__globals__', {}).get('__name__', '')
        if not module.startswith('chainermn.'):
            return True
        method = getattr(method, '__wrapped__', None)
    return False


def needs_default(cls: type, name: str) -> bool:
    """Return whether an operation needs its default, because a class overrides methods it calls."""
    return not overrides(cls, name) and any(
        overrides(cls, called) for called in CALLED.get(name, ()))


def overridden_in_channel(cls: type) -> list[str]:
    """Return the methods of ``Channel`` that call a method that a class overrides."""
    return [name for called, names in _IN_CHANNEL.items() if overrides(cls, called)
            for name in names]


def share_error(comm: Version7, operation: str, error: Exception | None) -> None:
    """Raise the errors of all ranks on all ranks. Collective: every rank calls it.

    Args:
        comm: The communicator.
        operation: Name of the operation that failed.
        error: Error of this rank, or ``None``.
    """
    own = None if error is None else RemoteError.of(operation, error)
    failures = comm.allgather_obj(own)
    if any(failures):
        common = remote_error([operation] * comm.size, failures)
        common_error.mark_failure(common, comm.rank, failures)
        raise common from error


def allgather_obj(comm: Version7, obj: _T) -> list[_T]:
    gathered = comm.gather_obj(obj)
    objs = None if gathered is None else list(gathered)
    received = comm.bcast_obj(objs)
    return received if objs is None else objs


def scatter_obj(comm: Version7, objs: Sequence[_T] | None, root: int) -> _T:
    with raise_together(comm, 'scatter_obj'):
        if comm.rank == root and (objs is None or len(objs) != comm.size):
            raise ValueError(f'expected one object for each of the {comm.size} ranks but got '
                             f'{objs if objs is None else len(objs)}')
    if comm.rank != root:
        return comm.recv_obj(root, tag=_TAG)
    assert objs is not None
    for rank, obj in enumerate(objs):
        if rank != root:
            comm.send_obj(obj, rank, _TAG)
    return copy.deepcopy(objs[root])  # other ranks also get copies


def allreduce_many(comm: Version7, xs: Sequence[SameArray], op: str) -> tuple[SameArray, ...]:
    if op == 'sum':
        return tuple([comm.allreduce(x) for x in xs])
    return tuple([_combine(comm.allgather(x), op) for x in xs])


def reduce(comm: Version7, x: SameArray, op: str, root: int) -> SameArray | None:
    check_op(op)
    arrays = comm.gather(x, root)
    return None if arrays is None else _combine(arrays, op)


def reduce_scatter(comm: Version7, xs: Array | Sequence[Array], op: str) -> ReceivedArrays:
    check_op(op)
    return _combine(comm.alltoall(tuple(xs)), op)


def multi_node_mean(comm: Version7, x: SameArray) -> SameArray:
    if x.dtype.kind != 'f':
        raise TypeError(f'multi_node_mean needs a floating-point array, not {x.dtype}; cast it, or '
                        'use allreduce')
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    xp = chainer.backend.get_array_module(x)
    # NumPy's operators return scalars for arrays without dimensions; return an array instead.
    return xp.asarray(comm.allreduce(wide) / wide.dtype.type(comm.size), x.dtype)


def new_group(comm: _Comm, ranks: Sequence[int]) -> _Comm | None:
    members = checked_members(ranks, comm.size)
    is_member = comm.rank in members
    group = comm.split(0 if is_member else 1, members.index(comm.rank) if is_member else comm.rank)
    if is_member:
        return group
    group.finalize()
    return None


def checked_members(ranks: Sequence[int], size: int) -> list[int]:
    """Return the ranks of a group, after checking them."""
    if not isinstance(ranks, Iterable) or not all(map(is_integer, ranks := [*ranks])):
        raise TypeError(f'ranks must be a list of integers, not {ranks!r}')
    members = [operator.index(rank) for rank in ranks]
    if not members or sorted(set(members)) != sorted(members):
        raise ValueError(f'ranks must contain at least one rank and each rank only once, not '
                         f'{members}')
    if not (min(members) >= 0 and max(members) < size):
        raise ValueError(f'ranks must be from 0 to {size - 1}, not {members}')
    return members


def send_activation(comm: Version7, data: Arrays, dest: int, tag: int,
                    needs_gradient: bool) -> Activation:
    """Send data as ChainerMN 7 does; only data that needs no gradient is marked."""
    if needs_gradient:
        comm.send(data, dest, tag)
    else:
        is_tuple = isinstance(data, (tuple, list))
        arrays = tuple(data) if is_tuple else (data,)
        bits = np.append(_MARK, np.uint8(is_tuple)).astype(arrays[0].dtype)
        mark = chainer.backend.get_array_module(arrays[0]).asarray(bits)
        comm.send((*arrays, mark), dest, tag)
    return Activation(dest, tag, -1, needs_gradient, '')


def recv_activation(comm: Version7, source: int, tag: int) -> tuple[Arrays, Activation]:
    data = comm.recv(source, tag)
    if not isinstance(data, (tuple, list)):
        return data, Activation(source, tag, -1, True, '')
    *arrays, mark = data
    if mark.shape == (len(_MARK) + 1,):
        bits = chainer.cuda.to_cpu(mark)
        if np.array_equal(bits[:-1], _MARK):
            received = tuple(arrays) if bits[-1] else arrays[0]
            return received, Activation(source, tag, -1, False, '')
    return tuple(data), Activation(source, tag, -1, True, '')


def _combine(arrays: Sequence[Array], op: str) -> Array:
    """Combine arrays element by element; float16 is combined in float32."""
    check_op(op, arrays[0].dtype)
    xp = chainer.backend.get_array_module(*arrays)
    ufunc = getattr(xp, _UFUNCS[op])
    if len(arrays) == 1:
        return xp.asarray(arrays[0]).copy()
    wide = [x.astype(np.float32) if x.dtype == np.float16 else x for x in arrays]
    with np.errstate(over='ignore', invalid='ignore'):  # MPI does not warn
        return xp.asarray(functools.reduce(ufunc, wide)).astype(arrays[0].dtype, copy=False)
