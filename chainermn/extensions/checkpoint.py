"""The checkpointer: each rank saves its state; all resume at the newest complete checkpoint."""
from __future__ import annotations

import os
import sys
import time
import types
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

import chainer
import numpy as np

from chainermn._operations.arguments import is_integer
from chainermn._operations.on_all_ranks import check_equal, raise_on_all_ranks, raise_together
from chainermn._process import runtime
from chainermn._process.program_place import program_place
from chainermn._types import Object
from chainermn.communicators._recognize import as_communicator, is_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._calls import called_by
from chainermn.extensions._checkpointing import resume, state
from chainermn.extensions._checkpointing.background import wait_for_all
from chainermn.extensions._checkpointing.parts import SavedParts
from chainermn.extensions._checkpointing.removal import (
    remove_at_end,
    remove_completed,
    remove_files,
)
from chainermn.extensions._checkpointing.save_names import SaveNames
from chainermn.extensions._checkpointing.saver import Save, Saver
from chainermn.extensions._checkpointing.selection import select
from chainermn.extensions._replica_check import ReplicaCheck


class _OptimizerProxy(Protocol):
    """A multi-node optimizer."""

    target: chainer.Link

    def is_changed(self, target: chainer.Link) -> bool: ...


def create_multi_node_checkpointer(name: str, comm: CommunicatorBase, cp_interval: int = 5,
                                   gc_interval: int = 5, path: str | None = None, *,
                                   allow_pickle: bool = False, allow_other_classes: bool = False,
                                   allow_different_models: bool = False
                                   ) -> MultiNodeCheckpointer:
    """Create an extension that saves the state of each rank so that interrupted jobs can resume.

    Each rank writes its own files ``<path>/<name>.<rank>.<iteration>``, atomically. After training,
    the files are removed when all ranks have exited without an error.
    docs/checkpoints.md lists all guarantees.

    Training stops only while the state is copied in memory; a thread writes the copy. On the CPU,
    the thread also copies large states of update rules while the next gradients are computed. At
    the next checkpoint, at the end of training and before loading, all ranks wait until all files
    are on disk. If a rank could not write its file, all ranks then raise an OSError.

    Without a Trainer, save and load a dict of the objects that have a state. ``save`` returns when
    all ranks have written their files; ``save(..., wait=False)`` works as in a Trainer.

    Collective: all ranks trigger the extension in the same iterations.

    The files are locked from the first load or save until they are removed. Another job with the
    same name and folder gets an error that shows which job has the lock.

    Args:
        name: Name of the run, the same on all ranks.
        comm: ChainerMN communicator.
        cp_interval: Number of checkpoints to keep (the newest ones).
        gc_interval: Number of additional checkpoints that may exist before old ones are removed.
        path: Folder of the files; the trainer's ``out`` by default. A relative path is resolved
            only once: here, or when the extension first sees the trainer.
        allow_pickle: Whether to save and load arrays of Python objects. Loading them runs any code
            that the files contain.
        allow_other_classes: Whether to load a checkpoint whose models, optimizers, update rules or
            iterators have different classes. States with the same names are then loaded, even if
            their meanings differ.
        allow_different_models: Whether the ranks may train different models. Otherwise, rank 0
            warns once if the parameters that an optimizer of the checkpoint has trained differ
            between ranks, for example because :func:`chainermn.create_multi_node_optimizer` was not
            used. Models are not compared if they have different layers, or if user code calls
            operations itself between checkpoints, as in model parallelism.

    Returns:
        The extension.

    Raises:
        ValueError: On every rank, if the name contains a slash or an interval is less than 1.
        TypeError: On every rank, if the name is not a string or an interval is not an integer.
        OSError: On every rank, if any rank cannot write to its folder.

    Example:
        >>> checkpointer = chainermn.create_multi_node_checkpointer('run', comm)
        >>> trainer.extend(checkpointer, trigger=(1000, 'iteration'))
        >>> iteration = checkpointer.maybe_load(trainer, optimizer)
        >>> trainer.run()

        Without a trainer:

        >>> state = {'model': model, 'optimizer': optimizer}
        >>> checkpointer = chainermn.create_multi_node_checkpointer('loop', comm, path='loop')
        >>> start = checkpointer.maybe_load(state) or 0
        >>> for iteration in range(start, 4):
        ...     optimizer.update(model, *batch)
        ...     if iteration % 2 == 1:
        ...         checkpointer.save(state, iteration + 1)
        >>> checkpointer.finalize()
    """
    if is_communicator(name) or not is_communicator(comm):
        error = TypeError('create_multi_node_checkpointer needs a name and a communicator, in this '
                          f'order, but got a {type(name).__name__} and a {type(comm).__name__}. '
                          "Call create_multi_node_checkpointer('run', comm).")
        if is_communicator(name):
            as_communicator(name, 'create_multi_node_checkpointer').refuse(
                'create_multi_node_checkpointer', error)
        raise error
    comm = as_communicator(comm, 'create_multi_node_checkpointer')
    if not isinstance(name, str) or not is_integer(cp_interval) or not is_integer(gc_interval):
        comm.refuse('create_multi_node_checkpointer', TypeError(
            'name must be a string, and intervals must be integers; got '
            f'{name!r}, cp_interval={cp_interval!r}, gc_interval={gc_interval!r}'))
    if '/' in name or cp_interval < 1 or gc_interval < 1:
        comm.refuse('create_multi_node_checkpointer', ValueError(
            f"name must not contain a slash, but is {name!r}; pass the folder as path='...'"
            if '/' in name else 'intervals must be at least 1; got '
            f'cp_interval={cp_interval}, gc_interval={gc_interval}'))
    with raise_on_all_ranks(comm, 'create_multi_node_checkpointer'):
        if path is not None:
            _check_writable(path)
    check = ReplicaCheck(comm, 'create_multi_node_checkpointer', not allow_different_models)
    return MultiNodeCheckpointer(name, comm, cp_interval, gc_interval, path, allow_pickle,
                                 allow_other_classes, check)


def _check_writable(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        reason = str(error)
    else:
        if os.access(folder, os.W_OK):
            return
        reason = f'cannot write to {folder!r}'
    raise OSError(f'checkpoints cannot be saved: {reason}. Pass a different folder, or change its '
                  'permissions. To load from a folder that is not writable, pass it to maybe_load.')


def _trained_models(parts: SavedParts) -> dict[str, Object]:
    """Return the models that optimizers of an object have trained.

    Returns:
        The models by their names in the trainer or dict.
    """
    trained = {id(link) for part in parts.all.values()
               if hasattr(part, 'update') and getattr(part, 't', False)
               and isinstance(getattr(part, 'target', None), chainer.Link)
               for link in part.target.links()}
    return {prefix.removeprefix('updater/model:').rstrip('/'): model
            for prefix, model in parts.models.items() if id(model) in trained}


class _Checkpointers(runtime.ProcessState):
    def __init__(self) -> None:
        #: The checkpointer of this process that saved last, by lock file.
        self.last_to_save: weakref.WeakValueDictionary[str, MultiNodeCheckpointer] = (
            weakref.WeakValueDictionary())
        #: The random state to restore when training starts, by the trainer that was loaded.
        self.random: weakref.WeakKeyDictionary[
            chainer.training.Trainer, dict[str, np.ndarray]] = weakref.WeakKeyDictionary()


class _CheckpointStats:
    """The durations of the checkpoints."""

    def __init__(self) -> None:
        self.durations: list[float] = []

    def report(self) -> str:
        if not self.durations:
            return 'no checkpoints were saved'
        return (f'Snapshot duration stats (sec): avg={np.mean(self.durations):f}, '
                f'min={min(self.durations):f}, max={max(self.durations):f}')


class MultiNodeCheckpointer(chainer.training.Extension):
    """See :func:`chainermn.create_multi_node_checkpointer`.

    Example:
        >>> checkpointer = chainermn.create_multi_node_checkpointer('run', comm)
        >>> isinstance(checkpointer, chainermn.MultiNodeCheckpointer)
        True
    """

    default_name: str = '_MultiNodeCheckpointer'  # as in older checkpoints
    priority: int = -1000  # to save the changes of all other extensions, including triggers

    def __init__(self, name: str, comm: CommunicatorBase, cp_interval: int, gc_interval: int,
                 path: str | None, allow_pickle: bool, allow_other_classes: bool,
                 replica_check: ReplicaCheck) -> None:
        self.name = name
        self.cp_interval = cp_interval
        self.gc_interval = gc_interval
        self.comm = comm
        self._rank = comm.rank
        self.path: str | None = None
        self._has_trainer = False
        self._set_path(path, None)
        self.allow_pickle = allow_pickle
        self.allow_other_classes = allow_other_classes
        self._replica_check = replica_check
        self.stats = _CheckpointStats()
        self._saver = Saver(comm, f'checkpoint {name!r}', range(comm.size), self._find_obsolete)
        self._target: Callable[[], object] = lambda: None  # the last saved object, if it exists
        self._failed = False

    @called_by('create_multi_node_checkpointer')
    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Lock the files before time is spent on training; restore the random number generators.

        Collective: every rank calls it.

        Raises:
            OSError: On every rank, if any rank cannot write to its folder, or if a folder has the
                name of a checkpoint file.
            RuntimeError: On every rank, if another job uses this name in this folder.
            ValueError: On every rank, if the checkpointer's name differs between ranks.
        """
        self._set_path(None, trainer)
        self._lock(must_write=True)
        # User code may have drawn random numbers since loading, e.g. to initialize another model.
        state.restore_random(runtime.get(_Checkpointers).random.pop(trainer, {}))

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Save the trainer."""
        self._set_path(None, trainer)
        self.save(trainer, trainer.updater.iteration, wait=False)

    @called_by('create_multi_node_checkpointer')
    def save(self, target: object, iteration: int, wait: bool = True) -> None:
        """Save an object. Collective: every rank calls it.

        Args:
            target: Any object that Chainer can serialize, such as a trainer or a model; or a dict
                of such objects.
            iteration: Number of the checkpoint, the same on all ranks.
            wait: Whether to wait until the files of all ranks are on disk. Otherwise, the method
                returns when the state has been copied in memory, except for states of update rules,
                which may be copied until the next update. A thread writes the copy.

        Raises:
            OSError: On every rank, if any rank could not write this checkpoint, or the previous
                checkpoint if that was saved with ``wait=False``. The next call saves again.
            RuntimeError: On every rank, if another job uses this name in this folder.
            ValueError: On every rank, if the iteration or the checkpointer's name differs between
                ranks.
            TypeError: On every rank, if the state of any rank contains Python objects.
            Exception: On every rank, if the target raises an error on a rank.

        Example:
            >>> checkpointer = chainermn.create_multi_node_checkpointer('run', comm, path='saves')
            >>> checkpointer.save({'model': model, 'optimizer': optimizer}, iteration=100)
        """
        self._set_path(None, target)
        if not self._saver.lock.is_held or remove_completed(self.comm, self._names):
            self._lock()
        names = self._names
        self._saver.wait()
        start = time.perf_counter()
        with raise_together(self.comm, 'saving a checkpoint'):
            if not is_integer(iteration):
                raise TypeError('save(target, iteration): iteration must be an integer, not '
                                f'{type(iteration).__name__}')
            if not isinstance(target, Mapping) and not hasattr(target, 'serialize'):
                raise TypeError(
                    'save(target, iteration): target must be a dict of objects, such as '
                    "{'model': model, 'optimizer': optimizer}, or an object with a serialize "
                    f'method, not {type(target).__name__}')
            self._check_target(target)
            parts = SavedParts(target)
            copy = state.CopiedState.of(parts, self.allow_pickle)
            digests = self._replica_check.digests(_trained_models(parts))
        by_rank = self._saver.complete(iteration, digests)
        if not self._rank:
            self._replica_check.compare(by_rank)
        self._saver.start(Save(
            iteration, names.path(iteration, self._rank), copy, names=names,
            on_written=lambda: self.stats.durations.append(time.perf_counter() - start)))
        if wait:
            self._saver.flush()

    @called_by('maybe_load of the checkpointer')
    def maybe_load(self, trainer: object,
                   optimizer: _OptimizerProxy | chainer.Optimizer | None = None,
                   path: str | None = None) -> int | None:
        """Load the newest checkpoint that is complete on all ranks, if there is one.

        Collective: every rank calls it. Extensions that are added to the trainer later are restored
        when they are added.

        A checkpoint of a different number of ranks is loaded if their models and optimizers were
        identical. Iterators then continue at the same fraction of the epoch. The random numbers
        will differ from the saved run, and so will the order of the data, except with
        ``MultiNodeOrderSampler`` and ``ShardedIterator``.

        Args:
            trainer: The object to load into, of the type that was saved; or a dict of such objects.
            optimizer: Multi-node or KVStore optimizer. If it is passed, or if a dict is loaded, the
                first update after loading changes the parameters as usual, for all multi-node and
                KVStore optimizers of the trainer or dict. Otherwise, their first update only copies
                rank 0's parameters to all ranks, so the gradients of one batch are lost. Other
                types of optimizers always change the parameters.
            path: Folder of the files, from now on.

        Returns:
            The iteration of the checkpoint; ``None`` if there is no checkpoint. Rank 0 also logs
            it, or prints it if your script has not set up logging.

        Raises:
            RuntimeError: On every rank, if another job uses this name in this folder.
            OSError: On every rank, if a folder has the name of a checkpoint file.
            TypeError: On every rank, if ``trainer`` and ``optimizer`` are swapped.
            ValueError: On every rank, if the checkpointer's name differs between ranks; if the
                newest checkpoint is from a different number of ranks whose states differed; if it
                was saved with different classes of models, optimizers, update rules or iterators;
                or if a file contains Python objects.
            Exception: On every rank, if the trainer raises an error on a rank.

        Warns:
            RuntimeWarning: On rank 0, for each checkpoint that is skipped, with the reason; if a
                different number of ranks saved the checkpoint; and if the checkpoint has no state
                for some extensions, which start from scratch.

        Example:
            >>> checkpointer = chainermn.create_multi_node_checkpointer('run', comm, path='runs')
            >>> start = checkpointer.maybe_load({'model': model, 'optimizer': optimizer}) or 0
            >>> start  # there is no checkpoint yet
            0
        """
        if isinstance(optimizer, chainer.training.Trainer):
            self.comm.refuse('maybe_load', TypeError(
                'maybe_load: the trainer comes first: maybe_load(trainer, optimizer).'))
        self._saver.flush()
        wait_for_all()  # another checkpointer of this process may still be writing
        self._set_path(path, trainer)
        self._lock()
        title = f'run {self.name!r} in {self.path}'
        selection = select(self.comm, self._names, range(self.comm.size), title)
        if selection is None:
            return None
        with raise_together(self.comm, 'loading'):
            parts = SavedParts(trainer)
        is_restored = resume.load(self.comm, selection, parts, self.allow_pickle,
                                  allow_other_classes=self.allow_other_classes, title=title)
        if isinstance(trainer, chainer.training.Trainer):
            runtime.get(_Checkpointers).random[trainer] = (
                state.capture_random() if is_restored else {})
        if optimizer is not None or isinstance(trainer, Mapping):
            for each in (optimizer, *parts.all.values()):
                if hasattr(each, 'is_changed'):
                    each.is_changed(each.target)  # the optimizer remembers the parameters
        return selection.iteration

    def get_stats(self) -> str:
        """Return a text with statistics of how long saving took, in seconds.

        Example:
            >>> chainermn.create_multi_node_checkpointer('run', comm).get_stats()
            'no checkpoints were saved'
        """
        return self.stats.report()

    def on_error(self, trainer: chainer.training.Trainer, exc: Exception,
                 tb: types.TracebackType) -> None:
        """Remember that training failed."""
        self._failed = True

    @called_by('create_multi_node_checkpointer')
    def finalize(self) -> None:
        """Complete the last checkpoint. If training succeeded on all ranks, remove the files.

        Without a trainer, the files are removed immediately. After ``Trainer.run``, which calls
        this method, the files are removed when all ranks have exited without an error, because a
        later step may fail, such as saving the model. A second call removes the files immediately,
        and so does the first call if the communicator does not compare the calls of its ranks.

        Collective: every rank calls it, unless training failed.

        Raises:
            OSError: On every rank, if any rank could not write the last checkpoint.

        Example:
            >>> checkpointer = chainermn.create_multi_node_checkpointer('run', comm, path='done')
            >>> checkpointer.save({'model': model}, iteration=100)
            >>> checkpointer.finalize()  # removes the files
        """
        # Trainer.run calls this in a "finally" clause, and does not call on_error after
        # KeyboardInterrupt.
        if self._failed or sys.exc_info()[0] is not None:
            if failure := self._saver.pop_failure():
                warnings.warn_explicit(f'the last checkpoint was not saved: {failure}',
                                       RuntimeWarning, *program_place())
            self._saver.lock.release()
            return
        if self.path is None:
            return
        if remove_completed(self.comm, self._names):
            return
        if not self._saver.lock.is_held:
            self._lock()
        if self._has_trainer:
            self._saver.flush()
            remove_at_end(self.comm, self._names, self._saver.lock)
        else:
            self._saver.complete(None)
            remove_files(self.comm, self._names)
            self._saver.lock.release()

    def _find_obsolete(self, save: Save) -> list[int]:
        # An earlier run may have left later checkpoints here that other ranks do not have.
        past = [iteration for iteration in self._names.find(self._rank)
                if iteration <= save.iteration]
        is_due = len(past) >= self.cp_interval + self.gc_interval
        return past[:-self.cp_interval] if is_due else []

    def _check_target(self, target: object) -> None:
        """Raise ValueError if two checkpointers replace each other's files."""
        path = self._names.lock_path(self._rank)
        last_to_save = runtime.get(_Checkpointers).last_to_save
        theirs = last_to_save.get(path, self)._target()
        is_replaced = theirs is not None and theirs is not self._target()
        if is_replaced and self._target() is not None and theirs is not target:
            raise ValueError(
                f'two checkpointers named {self.name!r} save different objects to {self.path} and '
                "replace each other's files. Give them different names or folders.")
        last_to_save[path] = self
        try:
            self._target = weakref.ref(target)
        except TypeError:  # no weak references, e.g. to a dict
            self._target = lambda: None

    def _set_path(self, path: str | None, target: object) -> None:
        if path is None and self.path is None:
            path = getattr(target, 'out', None)
        if path is not None:
            self.path = os.path.abspath(path)  # because user code may change the directory
        self._has_trainer = self._has_trainer or hasattr(target, 'updater')

    def _lock(self, must_write: bool = False) -> None:
        """Lock the files. Collective: every rank calls it."""
        with raise_together(self.comm, 'locking checkpoints'):
            names = self._names
            names.check_no_folder(self._rank)
        check_equal(self.comm, [repr(name) for name in self.comm.allgather_obj(self.name)],
                    'the ranks have different names for the checkpointer',
                    'Pass the same name on all ranks; folders may differ.')
        remove_completed(self.comm, names)  # the files of an earlier training run
        self._saver.lock.acquire(names, must_write)

    @property
    def _names(self) -> SaveNames:
        if self.path is None:
            raise TypeError('the checkpointer has no folder. Pass path=; only a trainer provides '
                            'a default.')
        return SaveNames(self.path, lambda iteration, rank: f'{self.name}.{rank}.{iteration}')


_MultiNodeCheckpointer = MultiNodeCheckpointer  # the name in ChainerMN 7
