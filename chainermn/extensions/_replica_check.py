"""Warns if models differ between ranks, e.g. because of a missing multi-node optimizer.

The evaluators and the checkpointer attach digests to messages that they send anyway. A digest
covers a sample of each parameter, so its cost does not depend on the sizes of the parameters. A
sample is enough, because training changes nearly all elements.
"""
from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import chainer

from chainermn._operations.ranks import group_lines
from chainermn._process import runtime
from chainermn._process.program_place import program_place
from chainermn._timeline import activities
from chainermn._types import Array, Object, Parameter
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers._optimizer_proxy import by_first_path

_SAMPLE = 256  # maximum number of elements of each parameter
_DIGEST = 6  # bytes


class _ComparedPart(NamedTuple):
    """Parameters of a model that are compared."""

    model: str
    is_averaged: bool  # whether a multi-node optimizer trains them and has made them identical


class _PartDigest(NamedTuple):
    """The digest of some parameters on one rank."""

    layout: bytes  # digest of paths, dtypes and shapes
    values: bytes


#: The digests that a rank sends.
Digests: TypeAlias = Mapping[_ComparedPart, _PartDigest]


class _Warned(runtime.ProcessState):
    def __init__(self) -> None:
        self.is_done = False


class ReplicaCheck:
    """Compares the models of all ranks in each call of an extension.

    Models may differ by design. The following are not compared:

    - parameters that a multi-node optimizer trains with a different communicator, or has not
      broadcast yet;
    - other parameters, if user code on this rank has called an operation itself since the last
      check, for example for model parallelism or to average parameters periodically; or if the
      communicator comes from a different library, so that such calls cannot be counted;
    - models with different parameters, and everything that is not a parameter, such as the running
      averages of batch normalization.

    Create the check in the function that user code calls.

    Args:
        comm: The communicator.
        creator: Name of that function, which has the option ``allow_different_models``.
        is_enabled: Whether to compare models.
    """

    def __init__(self, comm: CommunicatorBase, creator: str, is_enabled: bool) -> None:
        self._comm, self._creator = comm, creator
        self._is_enabled = is_enabled and comm.size > 1
        self._n_calls = getattr(comm, '_n_calls_of_program', None)
        self._n_seen = self._n_calls and self._n_calls()
        self._place = program_place()

    def digests(self, models: Object) -> Digests:
        """Return the digests that this rank sends.

        Args:
            models: The models by name; objects other than links are skipped.
        """
        if not self._is_enabled or not isinstance(models, Mapping):
            return {}
        before, self._n_seen = self._n_seen, self._n_calls and self._n_calls()
        has_communicated = before is None or before != self._n_seen  # user code, or unknown
        averaged, others = self._trained()
        found = {}
        for name, model in models.items():
            if not isinstance(model, chainer.Link):
                continue
            parts: dict[bool, dict[str, Array]] = {False: {}, True: {}}
            for path, param in by_first_path(sorted(model.namedparams())).items():
                is_averaged = id(param) in averaged
                if id(param) not in others and param.is_initialized and (
                        is_averaged or not has_communicated):
                    parts[is_averaged][path] = param.array
            title = f'{name} ({type(model).__name__})' if name else type(model).__name__
            found.update({_ComparedPart(title, is_averaged): _digest(arrays)
                          for is_averaged, arrays in parts.items() if arrays})
        return found

    def compare(self, by_rank: Sequence[Digests]) -> None:
        """Warn, once per process, if the models differ. Only one rank calls it.

        Args:
            by_rank: The digests of all ranks.

        Warns:
            RuntimeWarning: If the digests differ.
        """
        if runtime.get(_Warned).is_done:
            return
        for part in by_rank[0]:
            found = [digests[part] for digests in by_rank if part in digests]
            if len(found) == self._comm.size and len({each.layout for each in found}) == 1 and (
                    len({each.values for each in found}) > 1):
                runtime.get(_Warned).is_done = True
                warnings.warn_explicit(
                    self._text(part, [each.values.hex() for each in found]), RuntimeWarning,
                    *self._place)
                return

    def _trained(self) -> tuple[set[int], set[int]]:
        """Return the ids of parameters that are identical on all ranks, and of other parameters."""
        averaged, others = set[int](), set[int]()
        for optimizer in activities.optimizers():
            if (target := getattr(optimizer, 'target', None)) is None:
                continue
            # Key-value store optimizers have no target_params, and may be asynchronous.
            broadcast = dict(getattr(optimizer, 'target_params', ()))
            is_ours = getattr(optimizer, 'communicator', None) is self._comm
            for path, param in _named(target):
                (averaged if is_ours and broadcast.get(path) else others).add(id(param))
        return averaged, others

    def _text(self, part: _ComparedPart, values: Sequence[str]) -> str:
        cause, advice = (
            ('since the last update of the multi-node optimizer, the parameters have changed on '
             'some ranks only',
             'Find the hook or extension that changes them, or the snapshot that only some ranks '
             'have loaded. CHAINERMN_DEBUG=1 compares the parameters after every 100th update.')
            if part.is_averaged else
            ('no multi-node optimizer trains this model',
             'Pass the optimizer to chainermn.create_multi_node_optimizer and use the result '
             'instead. If your script does not train the model, call comm.bcast_data(model) '
             'first.'))
        return '\n'.join([
            f'{self._creator}: the parameters of {part.model} differ between ranks: {cause}. '
            'Checksums:', *group_lines(enumerate(values)), advice,
            'If the models are meant to differ, pass allow_different_models=True to '
            f'{self._creator}.'])


def _named(model: Object) -> Iterable[tuple[str, Parameter]]:
    return model.namedparams() if hasattr(model, 'namedparams') else ()


def _digest(arrays: Mapping[str, Array]) -> _PartDigest:
    layout, values = (hashlib.blake2b(digest_size=_DIGEST) for _ in range(2))
    for path, array in arrays.items():
        layout.update(f'{path} {array.dtype} {array.shape}\n'.encode())
        flat = array.reshape(-1)  # a view, unless the array is not contiguous
        sample = flat[::-(-flat.size // _SAMPLE) or 1]
        values.update(chainer.cuda.to_cpu(sample).tobytes())
    return _PartDigest(layout.digest(), values.digest())
