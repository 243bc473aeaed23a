"""Loads the selected save: each rank its own file, or one rank for others, or for more ranks."""
from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Mapping
from typing import TypeVar

import chainer
import numpy as np

from chainermn._operations.on_all_ranks import raise_together
from chainermn._process import event
from chainermn._types import Object
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._checkpointing import classes, state
from chainermn.extensions._checkpointing.late_extensions import (
    find_trainers,
    hide_new,
    load_when_added,
)
from chainermn.extensions._checkpointing.merged_states import (
    MergedArrays,
    is_sharded,
    mean_of_sums,
    merge,
    read_shard,
    read_sums,
)
from chainermn.extensions._checkpointing.npz import Arrays
from chainermn.extensions._checkpointing.progress import (
    IteratorProgress,
    find_iterators,
    find_problem,
    is_loadable,
)
from chainermn.extensions._checkpointing.rank_file import accumulated
from chainermn.extensions._checkpointing.selection import Selection

_T = TypeVar('_T')

_MAX_NAMED = 3  # arrays in an error


def load(comm: CommunicatorBase, selection: Selection, target: object, allow_pickle: bool,
         group: CommunicatorBase | None = None, allow_other_classes: bool = False,
         title: str = '') -> bool:
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

    Returns:
        Whether the random number generators were restored, which another number of ranks cannot.

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
    return selection.size in (None, comm.size)


def _load(comm: CommunicatorBase, selection: Selection, target: object, allow_pickle: bool,
          group: CommunicatorBase | None, allow_other_classes: bool) -> str:
    """Load a save; return how the program differs from it, '' if it does not."""
    is_resized = selection.size not in (None, comm.size)
    if selection.is_for_all:
        group = comm
    is_replica = group is not None and group.rank > 0
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
    parts, iterators = state.find_parts(target), find_iterators(target)
    trainers, target = find_trainers(target), state.as_serializable(target)
    merged = _merge(comm, selection, target, opened, allow_pickle)
    new_extensions: list[str] = []
    with raise_together(comm, 'loading'), opened() as arrays:
        states = arrays if merged is None else MergedArrays(arrays, merged)
        sums = accumulated(arrays)
        _note_epochs(arrays, parts)  # iterators may use the sampler when they are loaded
        models = tuple(prefix for prefix, part in parts.items()
                       if hasattr(part, 'namedparams'))
        different = Differences(name, models)
        saved_by = selection.size if is_resized else None
        progress = {
            prefix: IteratorProgress(arrays, prefix, iterator, saved_by)
            for prefix, iterator in iterators.items()
            if (is_resized or is_replica)
            and not is_loadable(arrays, prefix, iterator, is_resized)}
        different.texts += [
            text for prefix, iterator in iterators.items() if prefix not in progress
            for text in find_problem(arrays, prefix, iterator)]
        try:
            with contextlib.ExitStack() as stack:
                for prefix, trainer in trainers.items():
                    new_extensions += stack.enter_context(hide_new(trainer, arrays, prefix))
                CheckedDeserializer(states, different, progress, is_resized).load(target)
        except KeyError as error:
            if not different.texts:
                if error.args[:1] == (different.missing,):
                    different.texts.append(f'{different.missing} is missing from the file')
                else:
                    raise
        except Exception:  # a consequence
            if not different.texts:
                raise
        if different.texts:
            return different.summary()
        if not is_resized:
            state.restore_random(arrays)
        for prefix, trainer in trainers.items():
            load_when_added(comm, trainer, states, prefix, strict=not is_resized)
    if comm.rank == 0 and new_extensions:
        warnings.warn(f'the save of iteration {selection.iteration} has no state for these '
                      'extensions, so they start from scratch: ' + ', '.join(new_extensions),
                      RuntimeWarning, stacklevel=4)
    if group is not None and group.size > 1 and sums and not selection.is_for_all and (
            group.rank == 0):
        warnings.warn(
            f'iteration {selection.iteration} is between the updates of a step '
            f'(n_accumulations), and {group.size} ranks share its file: all of them continue with '
            'the gradients that one rank accumulated. Use replica sets of one rank, or '
            'chainermn.create_multi_node_checkpointer.', RuntimeWarning, stacklevel=4)
    if is_resized and comm.rank == 0:
        warnings.warn(_resized_warning(comm, selection), RuntimeWarning, stacklevel=4)
    return ''


def _note_epochs(arrays: Mapping[str, np.ndarray], parts: Mapping[str, Object]) -> None:
    """Tell the order samplers of iterators the epochs that the iterators will load."""
    for prefix, part in parts.items():
        key, sampler = f'{prefix}epoch', getattr(part, 'order_sampler', None)
        if key in arrays and sampler is not None and hasattr(sampler, 'note_epoch'):
            sampler.note_epoch(int(arrays[key]))


def _merge(comm: CommunicatorBase, selection: Selection, target: object,
           opened: Callable[[], Arrays], allow_pickle: bool) -> dict[str, np.ndarray] | None:
    """Merge the parts of the state in all files, unless each rank only needs those in its own file.

    Collective: every rank calls it.

    Returns:
        The merged arrays; ``None`` if the file of this rank has all that it needs.
    """
    merged: dict[str, np.ndarray] | None = None
    with raise_together(comm, 'loading'):
        with opened() as arrays:
            shard = read_shard(arrays)
            sums = read_sums(arrays) if selection.is_for_all else {}
        if (shard or sums) and selection.is_for_all and comm.rank == 0:
            shards, of_ranks = [shard], [sums]
            for path in selection.paths[1:]:
                with Arrays(path, path, allow_pickle) as others:
                    shards.append(read_shard(others))
                    of_ranks.append(read_sums(others))
            merged = merge(shards) | mean_of_sums(of_ranks)
    if not (shard or sums):
        return None
    if selection.is_for_all:
        return comm.bcast_obj(merged)
    if is_sharded(target):
        return None
    found = comm.allgather_obj(shard)
    with raise_together(comm, 'loading'):
        return merge(found)


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
        #: Name of the last array that was not found.
        self.missing: str | None = None
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
        progress: What to load into iterators that cannot load the saved arrays, by the prefix of
            their names.
        is_resized: Whether another number of ranks saved, so that extensions and triggers load the
            state of one rank, where they find it.
        path: Prefix of the names, for Chainer.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], differences: Differences,
                 progress: Mapping[str, IteratorProgress] | None = None, is_resized: bool = False,
                 path: str = '') -> None:
        may_lack = is_resized and re.match('(extensions|extension_triggers|stop_trigger)/', path)
        super().__init__(arrays, path=path, strict=not may_lack)
        self._differences = differences
        self._progress = progress or {}
        self._is_resized = is_resized

    def __getitem__(self, key: str) -> CheckedDeserializer:
        return CheckedDeserializer(self.npz, self._differences, self._progress, self._is_resized,
                                   f'{self.path}{key.strip("/")}/')

    def __call__(self, key: str, value: _T) -> _T | int | float:
        if self.path in self._progress:
            return self._progress[self.path].value(key, value)
        if self.path.startswith(tuple(self._progress)):
            return value
        name = self.path + key.lstrip('/')
        if name not in self.npz:
            self._differences.missing = name
            if self.strict and self._differences.models and name.startswith(
                    self._differences.models):
                self._differences.texts.append(f'{name} is missing from the file')
                return value
        elif isinstance(value, chainer.get_array_types()):
            saved = self.npz[name]  # read once
            if saved.shape != value.shape and saved[()] is not None:
                self._differences.texts.append(
                    f'{name} has shape {saved.shape} in the file, {value.shape} in the program')
                return value
            return chainer.serializers.NpzDeserializer({name: saved}, path=self.path)(key, value)
        return super().__call__(key, value)
