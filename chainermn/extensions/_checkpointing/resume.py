"""Loads the selected checkpoint: each rank reads its own file, or one rank reads for others."""
from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import chainer
import numpy as np

from chainer_compat.updates.sharded_states import merge
from chainermn._operations.on_all_ranks import raise_together
from chainermn._process import event
from chainermn._process.program_place import program_place
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._checkpointing import classes, state
from chainermn.extensions._checkpointing.late_extensions import hide_new, load_when_added
from chainermn.extensions._checkpointing.merged_states import (
    MergedArrays,
    mean_of_sums,
    read_shard,
    read_sums,
)
from chainermn.extensions._checkpointing.npz import Arrays
from chainermn.extensions._checkpointing.parts import SavedParts
from chainermn.extensions._checkpointing.progress import (
    IteratorProgress,
    compare_iterators,
    note_epochs,
)
from chainermn.extensions._checkpointing.rank_file import accumulated, sharded_states
from chainermn.extensions._checkpointing.selection import Selection

_T = TypeVar('_T')

_MAX_NAMED = 3  # maximum number of arrays in an error message


def load(comm: CommunicatorBase, selection: Selection, parts: SavedParts, allow_pickle: bool,
         group: CommunicatorBase | None = None, allow_other_classes: bool = False,
         title: str = '') -> bool:
    """Load a checkpoint into an object and log its iteration. Collective: every rank calls it.

    Args:
        comm: ChainerMN communicator.
        selection: The checkpoint.
        parts: The parts of the object to load into.
        allow_pickle: Whether to load arrays of Python objects.
        group: Communicator whose first rank reads the file for the others; if ``None``, each rank
            reads its own file.
        allow_other_classes: Whether the classes of the parts may differ from the saved ones.
        title: Name of the checkpoints and their folder, for the log.

    Returns:
        Whether the random number generators were restored. That is impossible with a different
        number of ranks.

    Raises:
        ValueError: On every rank, if a class differs on any rank, unless that is allowed; if the
            shape of an array differs; or if a parameter is missing from the file.
        Exception: On every rank, if any rank cannot read or load a file.
    """
    saved_by = None if selection.size == comm.size else selection.size
    if selection.is_for_all:
        group = comm
    opened = _read(comm, selection, group, allow_pickle)
    if not allow_other_classes:
        _compare_classes(comm, selection, opened, parts)
    merged = _merge(comm, selection, parts, opened, allow_pickle)
    with raise_together(comm, 'loading'), opened() as arrays:
        states = arrays if merged is None else MergedArrays(arrays, merged)
        has_sums = bool(accumulated(states))
        has_residuals = False
        progress, problems = compare_iterators(
            states, parts.iterators, saved_by, is_replica=group is not None and group.rank > 0)
        differences = Differences(problems, (*parts.models,))
        new_extensions = _apply(states, parts, progress, differences, saved_by is not None)
        if not differences.texts:
            if saved_by is None:
                state.restore_random(states)
            for prefix, trainer in parts.trainers.items():
                load_when_added(comm, trainer, states, prefix, strict=saved_by is None)
            if group is not None and group.rank == 0 < group.size - 1:
                has_residuals = _have_residuals(parts)
    classes.raise_differences(  # this also raises an error of another rank
        comm, differences.summary(_name_of(selection)),
        f'iteration {selection.iteration} was not loaded: the script does not match the checkpoint',
        'Use the model, optimizer and dataset of the saved run. To start from the beginning, '
        'pass a different name or folder.')
    for text in _warnings(comm, selection, group, has_sums, has_residuals, new_extensions):
        warnings.warn_explicit(text, RuntimeWarning, *program_place())
    if comm.rank == 0:
        event.tell('Resumed from iteration %d of %s', selection.iteration, title)
    return saved_by is None


def _name_of(selection: Selection) -> str:
    return selection.path or f'the file of iteration {selection.iteration}'


def _read(comm: CommunicatorBase, selection: Selection, group: CommunicatorBase | None,
          allow_pickle: bool) -> Callable[[], Arrays]:
    """Return a function that opens the file that this rank loads. Collective: every rank calls it.

    The first rank of a group reads the file for the others.
    """
    name, content = _name_of(selection), None
    if group is None:
        return lambda: Arrays(name, name, allow_pickle)
    with raise_together(comm, 'loading'):
        if group.rank == 0:
            with open(name, 'rb') as file:
                content = np.frombuffer(file.read(), np.uint8)
    comm.barrier()  # raises that error on all ranks, before a group waits for its first rank
    data = group.bcast(content).data
    return lambda: Arrays(io.BytesIO(data), name, allow_pickle)


def _compare_classes(comm: CommunicatorBase, selection: Selection, opened: Callable[[], Arrays],
                     parts: SavedParts) -> None:
    """Raise an error on all ranks if a part has a different class.

    Collective: every rank calls it.
    """
    with raise_together(comm, 'loading'), opened() as arrays:
        differences = classes.find_differences(arrays, parts)
    classes.raise_differences(
        comm, differences,
        f'iteration {selection.iteration} was not loaded: it was saved with different classes',
        'Use the same classes. To load the states that have the same names anyway, pass '
        'allow_other_classes=True when you create the extension.')


def _apply(states: Mapping[str, np.ndarray], parts: SavedParts,
           progress: Mapping[str, IteratorProgress], differences: Differences, is_resized: bool
           ) -> list[str]:
    """Load the states and collect the differences.

    Returns:
        The names of the extensions whose state is not in the checkpoint.
    """
    new_extensions: list[str] = []
    note_epochs(states, parts.iterators)  # iterators may use the sampler when they are loaded
    try:
        with contextlib.ExitStack() as stack:
            for prefix, trainer in parts.trainers.items():
                new_extensions += stack.enter_context(hide_new(trainer, states, prefix))
            CheckedDeserializer(states, differences, progress, is_resized).load(parts.whole)
    except Exception as error:
        if not differences.texts:  # otherwise, the error is a consequence of the differences
            if not isinstance(error, KeyError) or error.args[:1] != (differences.missing,):
                raise
            differences.texts.append(f'{differences.missing} is missing from the file')
    return new_extensions


def _have_residuals(parts: SavedParts) -> bool:
    """Return whether an optimizer has loaded residuals of compression."""
    compressors = (getattr(part, 'compression', None) for part in parts.all.values())
    return any(array.dtype.kind == 'f' and array.any() for compressor in compressors
               if hasattr(compressor, 'serialize')
               for array in state.copy_state(compressor).values())


def _warnings(comm: CommunicatorBase, selection: Selection, group: CommunicatorBase | None,
              has_sums: bool, has_residuals: bool, new_extensions: Sequence[str]
              ) -> Iterator[str]:
    """Return the warnings of this rank."""
    if comm.rank == 0 and new_extensions:
        yield (f'the files of iteration {selection.iteration} have no state for these extensions, '
               'so they start from scratch: ' + ', '.join(new_extensions))
    if has_sums and group is not None and not selection.is_for_all and (
            group.size > 1 and group.rank == 0):
        yield (f'iteration {selection.iteration} was saved in the middle of a gradient '
               f'accumulation (n_accumulations), and {group.size} ranks share its file, so all of '
               'them continue with the gradients that one rank accumulated. Use replica sets of '
               'one rank, or chainermn.create_multi_node_checkpointer.')
    if has_residuals and group is not None and not selection.is_for_all:
        yield (f'iteration {selection.iteration} was saved with residuals of compressed gradients, '
               f'and {group.size} ranks share its file, so only rank {comm.rank} continues with '
               'its residuals; the other ranks start without residuals. Use replica sets of one '
               'rank, or chainermn.create_multi_node_checkpointer.')
    if comm.rank == 0 and selection.size not in (None, comm.size):
        text = (f'iteration {selection.iteration} was saved by {selection.size} ranks and is '
                f'loaded on {comm.size}: the random numbers will differ from the saved run. So '
                'will the order of the data, except with MultiNodeOrderSampler and '
                'ShardedIterator. All ranks load the extensions of one rank')
        if not selection.are_buffers_equal:
            text += ('; arrays of the model that are not parameters, such as the means of batch '
                     'normalization, differed between the ranks, and all ranks load the values of '
                     'one rank')
        yield text


def _merge(comm: CommunicatorBase, selection: Selection, parts: SavedParts,
           opened: Callable[[], Arrays], allow_pickle: bool) -> dict[str, np.ndarray] | None:
    """Merge the parts of the state in all files, unless each rank only needs its own file.

    Collective: every rank calls it.

    Returns:
        The merged arrays; ``None`` if the file of this rank contains everything that it needs.
    """
    with raise_together(comm, 'loading'), opened() as arrays:
        sharded = sharded_states(list(arrays))
        if selection.is_for_all:
            is_complete = not sharded and not accumulated(arrays)
        else:
            is_complete = all(key.startswith(parts.sharded) for key in sharded)
        if is_complete:
            return None
        shard = read_shard(arrays)
    if not selection.is_for_all:
        by_rank = comm.allgather_obj(shard)
        with raise_together(comm, 'loading'):
            return merge(by_rank)
    merged: dict[str, np.ndarray] | None = None
    with raise_together(comm, 'loading'):
        if comm.rank == 0:
            shards, sums = [], []
            for path in selection.paths:
                with Arrays(path, path, allow_pickle) as arrays:
                    shards.append(read_shard(arrays))
                    sums.append(read_sums(arrays))
            merged = merge(shards) | mean_of_sums(sums)
    return comm.bcast_obj(merged)


class Differences:
    """The differences between the objects of a script and a file.

    Args:
        texts: The differences that are already known.
        models: Prefixes of the names of models' arrays.
    """

    def __init__(self, texts: list[str], models: tuple[str, ...]) -> None:
        self.texts = texts
        #: Name of the last array that was not found.
        self.missing: str | None = None
        self.models = models

    def summary(self, file: str) -> str:
        """Return a line with the first differences, by name, and the file; ``''`` if none."""
        if not self.texts:
            return ''
        more = len(self.texts) - _MAX_NAMED
        return ('; '.join(sorted(self.texts)[:_MAX_NAMED]) + (f'; and {more} more' * (more > 0))
                + f' ({file})')


class CheckedDeserializer(chainer.serializers.NpzDeserializer):
    """Loads the arrays that have the saved shape and collects the differences.

    Args:
        arrays: The saved arrays by name.
        differences: Collects the differences.
        progress: The progress of the iterators that cannot load the saved arrays, by the prefix of
            their names.
        is_resized: Whether a different number of ranks saved the checkpoint. Extensions and
            triggers then load the state of one rank; values that are missing there are not errors.
        path: Prefix of the names, for Chainer.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], differences: Differences,
                 progress: Mapping[str, IteratorProgress], is_resized: bool, path: str = ''
                 ) -> None:
        is_lenient = is_resized and re.match('(extensions|extension_triggers|stop_trigger)/', path)
        super().__init__(arrays, path=path, strict=not is_lenient)
        self._differences = differences
        self._progress = progress
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
                    f'{name} has shape {saved.shape} in the file, but {value.shape} in the script')
                return value
            return chainer.serializers.NpzDeserializer({name: saved}, path=self.path)(key, value)
        return super().__call__(key, value)
