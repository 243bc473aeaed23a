"""Extensions that are added to a trainer after it was loaded: they load their states then."""
from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import NamedTuple

import chainer
import numpy as np

from chainermn._failures.on_all_ranks import raise_on_all_ranks
from chainermn._types import Object
from chainermn.communicators.communicator_base import CommunicatorBase

_FOLDERS = 'extensions/', 'extension_triggers/'


def find_trainers(target: object) -> dict[str, chainer.training.Trainer]:
    """Find the trainers of an object or dictionary, by the prefix of the names of their arrays."""
    parts = {f'{name}/': part for name, part in target.items()} if isinstance(
        target, Mapping) else {'': target}
    return {prefix: part for prefix, part in parts.items()
            if isinstance(part, chainer.training.Trainer)}


def load_when_added(comm: CommunicatorBase, trainer: chainer.training.Trainer,
                    arrays: Mapping[str, np.ndarray], prefix: str, strict: bool) -> None:
    """Load the states of further extensions and their triggers when they are added.

    Args:
        comm: ChainerMN communicator.
        trainer: A trainer that was loaded.
        arrays: The saved arrays by name.
        prefix: Prefix of the names of the trainer's arrays.
        strict: Whether a value that is missing in a saved state is an error.
    """
    folders = tuple(prefix + folder for folder in _FOLDERS)
    present = tuple(f'{folder}{name}/' for folder in folders for name in trainer._extensions)
    states = {key.removeprefix(prefix): arrays[key] for key in arrays
              if key.startswith(folders) and not key.startswith(present)}
    if states:
        trainer._extensions = extensions = _Extensions(trainer._extensions)
        extensions.loader = _Loader(comm, states, strict)


class _Loader(NamedTuple):
    comm: CommunicatorBase
    states: Mapping[str, np.ndarray]
    strict: bool

    def load(self, name: str, entry: Object) -> None:
        """Load an extension and its trigger, if their states were saved."""
        for folder, part in zip(_FOLDERS, (entry.extension, entry.trigger), strict=True):
            path = f'{folder}{name}/'
            if hasattr(part, 'serialize') and any(key.startswith(path) for key in self.states):
                with raise_on_all_ranks(self.comm, 'loading'):
                    part.serialize(chainer.serializers.NpzDeserializer(
                        self.states, path, self.strict))


class _Extensions(collections.OrderedDict[str, Object]):
    """The extensions of a trainer; ``Trainer.extend`` adds others."""

    loader: _Loader | None = None  # not yet, while the dictionary is created

    def __setitem__(self, name: str, entry: Object) -> None:
        super().__setitem__(name, entry)
        if self.loader is not None:
            self.loader.load(name, entry)
