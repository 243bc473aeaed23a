"""Tied parameters: they have the same value on several ranks, which sum their gradients."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from chainer.utils import force_array

from chainermn._operations.on_all_ranks import on_all_ranks
from chainermn._operations.ranks import group_lines
from chainermn._types import Array, Parameter
from chainermn.communicators.communicator_base import CommunicatorBase

#: Tags of tied parameters count up from this one; tags of stages count down from the largest.
_FIRST_TAG = 24576

_UNINITIALIZED = 'not initialized'


def descriptions(params: Mapping[str, Parameter]) -> dict[str, str]:
    """Return the shapes and dtypes of parameters as text, by name."""
    return {name: f'{param.shape} {param.dtype}' if param.is_initialized else _UNINITIALIZED
            for name, param in params.items()}


class Tied:
    """The parameters that this rank shares with other ranks.

    Args:
        comm: The communicator.
        params: The parameters of this rank, by name.
        by_rank: The result of :func:`descriptions` on each rank.

    Raises:
        ValueError: On all ranks, if a name exists on only one rank, if shapes or dtypes differ, or
            if a parameter is not initialized.
    """

    def __init__(self, comm: CommunicatorBase, params: Mapping[str, Parameter],
                 by_rank: Sequence[Mapping[str, str]]) -> None:
        all_names = sorted({name for each in by_rank for name in each})
        for name in all_names:
            found = [each[name] for each in by_rank if name in each]
            if len(found) < min(2, comm.size) or len(set(found)) > 1 or _UNINITIALIZED in found:
                raise on_all_ranks(comm, ValueError('\n'.join([
                    f'Pipeline: the tied parameter {name!r} differs',
                    *group_lines(enumerate(each.get(name, 'not shared') for each in by_rank)),
                    'Pass initialized parameters with the same name, shape and dtype on all ranks '
                    'that share the parameter.'])))
        self._comm = comm
        #: Each parameter, its tag, and the ranks that share it, in the same order on all ranks.
        self._shared = [
            (params[name], _FIRST_TAG + n,
             [rank for rank, each in enumerate(by_rank) if name in each])
            for n, name in enumerate(all_names) if name in params]

    def bcast(self) -> None:
        """Copy the value of each parameter from the first rank that shares it to the others."""
        for param, tag, ranks in self._shared:
            param.array[...] = self._allgather(param.array, tag, ranks)[0]

    def add(self, params: Sequence[Parameter], grads: list[Array | None]) -> None:
        """Replace gradients with their sums over the ranks that share the parameter.

        Args:
            params: Parameters.
            grads: Their gradients, some of which are replaced.
        """
        numbers = {id(param): n for n, param in enumerate(params)}
        for param, tag, ranks in self._shared:
            n = numbers[id(param)]
            grad = grads[n]
            found = self._allgather(
                param.xp.zeros_like(param.array) if grad is None else grad, tag, ranks)
            grads[n] = force_array(sum(found[1:], found[0]))

    def is_counted(self, param: Parameter) -> bool:
        """Return whether this rank counts a parameter in norms. Exactly one rank does."""
        return all(param is not other or ranks[0] == self._comm.rank
                   for other, _, ranks in self._shared)

    def _allgather(self, x: Array, tag: int, ranks: Sequence[int]) -> list[Array]:
        """Return the arrays of all the given ranks, which include this one."""
        comm = self._comm
        others = [rank for rank in ranks if rank != comm.rank]
        with comm.called_by('the all-gather of tied parameters in Pipeline'):
            sends = [comm.isend(x, rank, tag) for rank in others]
            found = {rank: comm.recv(rank, tag) for rank in others}
            comm.waitall(sends)
        return [x if rank == comm.rank else found[rank] for rank in ranks]
