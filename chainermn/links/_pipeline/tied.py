"""Tied parameters of several ranks: the same values, and the sum of their gradients."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from chainer.utils import force_array

from chainermn._operations.on_all_ranks import on_all_ranks
from chainermn._operations.ranks import group_lines
from chainermn._types import Array, Parameter
from chainermn.communicators.communicator_base import CommunicatorBase

#: The tags for tied parameters lie above the tags of the stages, whose number is smaller.
_FIRST_TAG = 24576

_UNINITIALIZED = 'not initialized'


def described(own: Mapping[str, Parameter]) -> dict[str, str]:
    """Return shape and dtype of parameters, by name."""
    return {name: f'{param.shape} {param.dtype}' if param.is_initialized else _UNINITIALIZED
            for name, param in own.items()}


class Tied:
    """The parameters that this rank shares with other ranks.

    Args:
        comm: The communicator.
        own: The parameters of this rank, by name.
        names: What :func:`described` returns on each rank.

    Raises:
        ValueError: On all ranks, if only one rank has a name, shapes or dtypes differ, or a
            parameter is not initialized.
    """

    def __init__(self, comm: CommunicatorBase, own: Mapping[str, Parameter],
                 names: Sequence[Mapping[str, str]]) -> None:
        all_names = sorted({name for each in names for name in each})
        for name in all_names:
            found = [each[name] for each in names if name in each]
            if len(found) < min(2, comm.size) or len(set(found)) > 1 or _UNINITIALIZED in found:
                raise on_all_ranks(comm, ValueError('\n'.join([
                    f'Pipeline: the tied parameter {name!r} differs',
                    *group_lines(enumerate(each.get(name, 'not shared') for each in names)),
                    'Pass initialized parameters of the same shape and dtype, by the same name on '
                    'all ranks that share it.'])))
        self._comm = comm
        #: By name, in the same order on all ranks: the parameter, its tag, and the ranks.
        self._shared = [
            (own[name], _FIRST_TAG + n, [rank for rank, each in enumerate(names) if name in each])
            for n, name in enumerate(all_names) if name in own]

    def bcast(self) -> None:
        """Copy the values of the first rank that shares a parameter to the others."""
        for param, tag, ranks in self._shared:
            param.array[...] = self._exchanged(param.array, tag, ranks)[0]

    def add(self, params: Sequence[Parameter], grads: list[Array | None]) -> None:
        """Replace gradients by their sums over the ranks that share the parameter.

        Args:
            params: Parameters.
            grads: Their gradients, some of which are replaced.
        """
        numbers = {id(param): n for n, param in enumerate(params)}
        for param, tag, ranks in self._shared:
            n = numbers[id(param)]
            grad = grads[n]
            found = self._exchanged(
                param.xp.zeros_like(param.array) if grad is None else grad, tag, ranks)
            grads[n] = force_array(sum(found[1:], found[0]))

    def counted(self, param: Parameter) -> bool:
        """Return whether this rank is the one that counts a parameter in norms."""
        return all(param is not other or ranks[0] == self._comm.rank
                   for other, _, ranks in self._shared)

    def _exchanged(self, x: Array, tag: int, ranks: Sequence[int]) -> list[Array]:
        """Return the arrays of all these ranks."""
        comm = self._comm
        others = [rank for rank in ranks if rank != comm.rank]
        with comm.called_by('the exchange of parameters that are tied in Pipeline'):
            sends = [comm.isend(x, rank, tag) for rank in others]
            found = {rank: comm.recv(rank, tag) for rank in others}
            comm.waitall(sends)
        return [x if rank == comm.rank else found[rank] for rank in ranks]
