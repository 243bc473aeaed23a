"""Handles extensions of a trainer that are not in a checkpoint, or are added after loading it."""
from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import chainer
import numpy as np

from chainermn._operations.on_all_ranks import raise_on_all_ranks
from chainermn._types import Object
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._checkpointing.state import copy_state

_FOLDERS = 'extensions/', 'extension_triggers/'


@contextlib.contextmanager
def hide_new(trainer: chainer.training.Trainer, arrays: Mapping[str, np.ndarray], prefix: str
             ) -> Iterator[list[str]]:
    """Hide the extensions that have been added to the script since the checkpoint.

    Args:
        trainer: Trainer to load; loading would raise an error for these extensions.
        arrays: The saved arrays by name.
        prefix: Prefix of the names of the trainer's arrays.

    Yields:
        The names of the hidden extensions that have a state.
    """
    present = trainer._extensions
    saved = collections.OrderedDict((name, entry) for name, entry in present.items()
                                    if _has_state(name, arrays, prefix))
    new = {name: entry.extension for name, entry in present.items() if name not in saved}
    trainer._extensions = saved
    try:
        yield [name for name, extension in new.items()
               if hasattr(extension, 'serialize') and copy_state(extension)]
    finally:
        trainer._extensions = present
    for name in new:
        _start_triggers(present[name])


def _has_state(name: str, arrays: Iterable[str], prefix: str = '') -> bool:
    paths = tuple(f'{prefix}{folder}{name}/' for folder in _FOLDERS)
    return any(key.startswith(paths) for key in arrays)


def _start_triggers(entry: Object) -> None:
    """Make the triggers of a new extension count from now on; else they would fire immediately."""
    triggers: list[Object] = [entry.trigger, getattr(entry.extension, '_trigger', None)]
    for trigger in triggers:
        if hasattr(trigger, 'serialize'):
            with contextlib.suppress(KeyError), warnings.catch_warnings():
                warnings.simplefilter('ignore')
                trigger.serialize(chainer.serializers.NpzDeserializer({}))


def load_when_added(comm: CommunicatorBase, trainer: chainer.training.Trainer,
                    arrays: Mapping[str, np.ndarray], prefix: str, strict: bool) -> None:
    """Load the states of extensions and their triggers when they are added later.

    Args:
        comm: ChainerMN communicator.
        trainer: The trainer that was loaded.
        arrays: The saved arrays by name.
        prefix: Prefix of the names of the trainer's arrays.
        strict: Whether a value that is missing in a saved state is an error.
    """
    folders = tuple(prefix + folder for folder in _FOLDERS)
    present = tuple(f'{folder}{name}/' for folder in folders for name in trainer._extensions)
    states = {key.removeprefix(prefix): arrays[key] for key in arrays
              if key.startswith(folders) and not key.startswith(present)}
    trainer._extensions = extensions = _Extensions(trainer._extensions)
    extensions.loader = _Loader(comm, states, strict)


class _Loader(NamedTuple):
    comm: CommunicatorBase
    states: Mapping[str, np.ndarray]
    strict: bool

    def load(self, name: str, entry: Object) -> None:
        """Load an extension and its trigger if their states were saved."""
        if not _has_state(name, self.states):
            _start_triggers(entry)
            return
        for folder, part in zip(_FOLDERS, (entry.extension, entry.trigger), strict=True):
            if hasattr(part, 'serialize'):
                with raise_on_all_ranks(self.comm, 'loading'):
                    try:
                        part.serialize(chainer.serializers.NpzDeserializer(
                            self.states, f'{folder}{name}/', self.strict))
                    except KeyError as error:
                        raise ValueError(
                            f'extension {name}: the state saved under this name has no entry '
                            f'{error.args[0]!r}. If this is a different extension, give it a '
                            'different name: trainer.extend(..., name=...).') from error


class _Extensions(collections.OrderedDict[str, Object]):
    """The extensions of a trainer; their states are loaded when ``Trainer.extend`` adds them."""

    loader: _Loader | None = None  # not set yet while the dict is created

    def __setitem__(self, name: str, entry: Object) -> None:
        super().__setitem__(name, entry)
        if self.loader is not None:
            self.loader.load(name, entry)
