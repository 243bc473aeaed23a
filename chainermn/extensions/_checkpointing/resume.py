"""Loads the selected save: each rank its own file, or one rank for others, or for more ranks."""
from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TypeVar

import chainer
import numpy as np

from chainermn._failures.on_all_ranks import raise_together
from chainermn._system import event
from chainermn._types import Object
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._checkpointing import classes, state
from chainermn.extensions._checkpointing.joined import (
    JoinedArrays,
    is_sharded,
    join,
    read_shard,
)
from chainermn.extensions._checkpointing.npz import Arrays
from chainermn.extensions._checkpointing.selection import Selection

_T = TypeVar('_T')

_MAX_NAMED = 3  # arrays in an error


def load(comm: CommunicatorBase, selection: Selection, target: object, allow_pickle: bool,
         group: CommunicatorBase | None = None, allow_other_classes: bool = False,
         title: str = '') -> None:
    """Load a save into an object, and log its iteration.  Collective: every rank calls it.

    Args:
        comm: ChainerMN communicator.
        selection: The save.
        target: The object to load into, or a dictionary of such objects.
        allow_pickle: Whether to load arrays of Python objects.
        group: Communicator of the ranks whose first one reads for the others; if ``None``, each
            rank reads its own file.
        allow_other_classes: Whether the classes of its parts may differ from the saved ones.
        title: Name of the saves and their folder, for the log.

    Raises:
        ValueError: On every rank, if a class differs on any rank, unless that is allowed; or if
            the shape of an array differs, or the file lacks a parameter.
        Exception: On every rank, any error of reading or loading on a rank.
    """
    differences = _load(comm, selection, target, allow_pickle, group, allow_other_classes)
    classes.raise_differences(  # or an error of another rank
        comm, differences, f'iteration {selection.iteration} was not loaded: the program differs '
        'from the checkpoint',
        'Use the model, optimizer and data set of the saved run. To start from the beginning, '
        'pass another name or folder.')
    if comm.rank == 0:
        event.tell('Resumed from iteration %d of %s', selection.iteration, title)


def _load(comm: CommunicatorBase, selection: Selection, target: object, allow_pickle: bool,
          group: CommunicatorBase | None, allow_other_classes: bool) -> str:
    """Load a save; return how the program differs from it, '' if it does not."""
    is_resized = selection.size not in (None, comm.size)
    if selection.is_for_all:
        group = comm
    name = selection.path or f'the file of iteration {selection.iteration}'
    if group is not None:
        content, error = np.empty(0, np.uint8), None
        if group.rank == 0:
            try:
                with open(name, 'rb') as file:
                    content = np.frombuffer(file.read(), np.uint8)
            except OSError as found:
                error = found
        content = group.bcast(content if group.rank == 0 else None)
        with raise_together(comm, 'loading'):
            if error is not None:
                raise error
        if not content.size:
            return ''  # the next operation raises that error

    def opened() -> Arrays:
        return Arrays(name if group is None else io.BytesIO(content.data), name, allow_pickle)

    if not allow_other_classes:
        with raise_together(comm, 'loading'), opened() as arrays:
            differences = classes.find_differences(arrays, target)
        classes.raise_differences(
            comm, differences,
            f'iteration {selection.iteration} was not loaded: it was saved with other classes',
            'Use the same classes. To load the states that have the same names, pass '
            'allow_other_classes=True when you create the extension.')
    parts, target = state.find_parts(target), state.as_serializable(target)
    joined = _join_shards(comm, selection, target, opened, allow_pickle)
    with raise_together(comm, 'loading'), opened() as arrays:
        states = arrays if joined is None else JoinedArrays(arrays, joined)
        _note_epochs(arrays, parts)  # iterators may use the sampler when they are loaded
        models = tuple(prefix for prefix, part in parts.items()
                       if hasattr(part, 'namedparams'))
        different = Differences(name, models)
        deserializer = (
            ResizedDeserializer(states, different, target, selection.size or 0) if is_resized
            else CheckedDeserializer(states, different))
        try:
            deserializer.load(target)
        except Exception:  # a consequence
            if not different.texts:
                raise
        if different.texts:
            return different.summary()
        if not is_resized:
            state.restore_random(arrays)
    if is_resized and comm.rank == 0:
        warnings.warn(_resized_warning(comm, selection), RuntimeWarning, stacklevel=4)
    return ''


def _note_epochs(arrays: Mapping[str, np.ndarray], parts: Mapping[str, Object]) -> None:
    """Tell the order samplers of iterators the epochs that the iterators will load."""
    for prefix, part in parts.items():
        key, sampler = f'{prefix}epoch', getattr(part, 'order_sampler', None)
        if key in arrays and sampler is not None and hasattr(sampler, 'note_epoch'):
            sampler.note_epoch(int(arrays[key]))


def _join_shards(comm: CommunicatorBase, selection: Selection, target: object,
                 opened: Callable[[], Arrays], allow_pickle: bool) -> dict[str, np.ndarray] | None:
    """Join the sharded states of all files, unless each rank only needs those in its own file.

    Collective: every rank calls it.

    Returns:
        The states of all parameters; ``None`` if the file of this rank has all that it needs.
    """
    joined: dict[str, np.ndarray] | None = None
    with raise_together(comm, 'loading'):
        with opened() as arrays:
            shard = read_shard(arrays)
        if shard and selection.is_for_all and comm.rank == 0:
            shards = [shard]
            for path in selection.paths[1:]:
                with Arrays(path, path, allow_pickle) as others:
                    shards.append(read_shard(others))
            joined = join(shards)
    if not shard:
        return None
    if selection.is_for_all:
        return comm.bcast_obj(joined)
    if is_sharded(target):
        return None
    found = comm.allgather_obj(shard)
    with raise_together(comm, 'loading'):
        return join(found)


def _resized_warning(comm: CommunicatorBase, selection: Selection) -> str:
    text = (f'iteration {selection.iteration} was saved by {selection.size} ranks and is loaded on '
            f'{comm.size}: the order of the data and the random numbers will differ from the saved '
            'run, and all ranks load the extensions of one rank')
    if not selection.are_buffers_equal:
        text += ('; arrays of the model that are not parameters, such as the means of batch '
                 'normalization, differed between the ranks, and all ranks load those of one rank')
    return text


class Differences:
    """How a program differs from a file.

    Args:
        file: Name of the file.
        models: Prefixes of the names of models' arrays.
    """

    def __init__(self, file: str, models: tuple[str, ...]) -> None:
        self.texts: list[str] = []
        self.models = models
        self._file = file

    def summary(self) -> str:
        """Return the first differences by name, in one line."""
        more = len(self.texts) - _MAX_NAMED
        return ('; '.join(sorted(self.texts)[:_MAX_NAMED]) + (f'; and {more} more' * (more > 0))
                + f' ({self._file})')


class CheckedDeserializer(chainer.serializers.NpzDeserializer):
    """Loads what has the saved shape, and collects the differences.

    Args:
        arrays: The saved arrays by name.
        differences: Where to collect them.
        path: Prefix of the names, for Chainer.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], differences: Differences, path: str = ''
                 ) -> None:
        super().__init__(arrays, path=path)
        self._differences = differences

    def __getitem__(self, key: str) -> CheckedDeserializer:
        return CheckedDeserializer(self.npz, self._differences, f'{self.path}{key.strip("/")}/')

    def __call__(self, key: str, value: _T) -> _T | int | float:
        name = self.path + key.lstrip('/')
        if name not in self.npz:
            if self.strict and self._differences.models and name.startswith(
                    self._differences.models):
                self._differences.texts.append(f'{name} is missing in the file')
                return value
        elif isinstance(value, chainer.get_array_types()):
            saved = self.npz[name]  # read once
            if saved.shape != value.shape and saved[()] is not None:
                self._differences.texts.append(
                    f'{name} has shape {saved.shape} in the file, {value.shape} in the program')
                return value
            return chainer.serializers.NpzDeserializer({name: saved}, path=self.path)(key, value)
        return super().__call__(key, value)


class ResizedDeserializer(CheckedDeserializer):
    """Loads a trainer that another number of ranks saved.

    Model, optimizer and iteration are as saved.  Each iterator continues at the same fraction of
    the same epoch in an order of its own, as the ranks' data sets have another length now; with
    an order sampler that can resume, at the same sample of the same order.
    Extensions and triggers load the state of one rank, where they find it.

    Args:
        arrays: The saved arrays by name.
        differences: Where to collect differences of shapes.
        target: The object to load into.
        size: Number of ranks that saved.
        path: Prefix of the names, for Chainer.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], differences: Differences, target: object,
                 size: int, path: str = '') -> None:
        super().__init__(arrays, differences, path)
        self._target = target
        self._size = size
        self.strict = not re.match('(extensions|extension_triggers|stop_trigger)/', path)

    def __getitem__(self, key: str) -> ResizedDeserializer:
        return ResizedDeserializer(self.npz, self._differences, self._target, self._size,
                                   self.path + key.strip('/') + '/')

    def __call__(self, key: str, value: _T) -> _T | int | float:
        found = re.match('(updater/iterator:([^/]*)/)', self.path)
        updater = getattr(self._target, 'updater', None)
        if found is None or updater is None:
            return super().__call__(key, value)
        if self.path != found[1]:
            return value
        progress = _IteratorProgress(self.npz, found[1])
        iterator = updater.get_iterator(found[2])
        resume = getattr(getattr(iterator, 'order_sampler', None), 'resume', None)
        resumed = None
        if resume is not None and progress.order is not None:
            resumed = resume(progress.order, int(progress.values['current_position']),
                             int(progress.values['epoch']), self._size)
            if key in ('order', '_order') and isinstance(value, np.ndarray):
                np.copyto(value, resumed.order)
                return value
        if key not in progress.values:
            return value
        if key == 'epoch':
            return int(progress.values[key])
        if key == 'is_new_epoch':
            return bool(progress.values[key])
        if resumed is not None:
            length, position = len(resumed.order), resumed.position
        else:
            try:
                length = len(iterator.dataset)
            except (AttributeError, TypeError):  # it has none, or one without an end
                length = 0
            position = min(int(progress.fraction * length), max(length - 1, 0))
        if key == 'current_position':
            return position
        if key == 'previous_epoch_detail':
            return progress.values.get('epoch', 0) + (position / length if length else 0.)
        return value


class _IteratorProgress:
    """The progress of a saved iterator."""

    def __init__(self, arrays: Mapping[str, np.ndarray], path: str) -> None:
        self.values: dict[str, float] = {
            key: arrays[path + key].item() for key in (
                'epoch', 'is_new_epoch', 'current_position', 'previous_epoch_detail')
            if path + key in arrays}
        self.order = order = next((arrays[path + key] for key in ('order', '_order')
                                   if path + key in arrays), None)
        if order is not None and order.size:
            fraction = Fraction(int(self.values.get('current_position', 0)), order.size)
        else:  # before the last batch
            fraction = Fraction(
                self.values.get('previous_epoch_detail', 0.) - self.values.get('epoch', 0))
        #: Of the epoch, from 0 to 1.
        self.fraction = min(max(fraction, Fraction(0)), Fraction(1))
