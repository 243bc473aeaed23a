"""The checkpointer: every rank saves itself, and all resume at the newest common iteration."""
from __future__ import annotations

import functools
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions import _durable, _loading, _random_state, _snapshot_files
from chainermn.extensions._background import wait_for_all
from chainermn.extensions._choose import choose
from chainermn.extensions._commit import Names
from chainermn.extensions._saver import Save, Saver, on_all_ranks, remove_commit


def create_multi_node_checkpointer(name: str, comm: CommunicatorBase, cp_interval: int = 5,
                                   gc_interval: int = 5, path: str | None = None, *,
                                   allow_pickle: bool = False) -> Any:
    """Makes an extension that lets a job that was interrupted go on where it was.

    Each rank writes its own files ``<path>/<name>.<rank>.<iteration>``.  A file is there only if it
    is whole.  Once those of all ranks are, rank 0 writes ``<path>/commit-<name>.<iteration>``, with
    their sizes and checksums.  After training ended well on all ranks they are removed; after an
    error they stay.  docs/checkpoints.md says what is promised, and when.

    Training stops only while the state is copied in memory; a thread writes the copy.  At the next
    checkpoint, at the end of the training and before loading all ranks wait until it is on the
    disk everywhere; if a rank could not write it, all raise an OSError there that names its file.

    >>> checkpointer = create_multi_node_checkpointer('run 1', comm)          # doctest: +SKIP
    >>> trainer.extend(checkpointer, trigger=(1000, 'iteration'))             # doctest: +SKIP
    >>> checkpointer.maybe_load(trainer, optimizer)                           # doctest: +SKIP
    >>> trainer.run()                                                         # doctest: +SKIP

    Without a Trainer, call ``checkpointer.maybe_load(model)`` and
    ``checkpointer.save(model, iteration)``, which by itself returns when all ranks have the file;
    ``save(model, iteration, wait=False)`` is what a Trainer does.

    Collective: all ranks trigger the extension in the same iterations.

    From loading, or the first saving, to the end the files are locked: another job with the same
    name and folder gets an error that says which job has them.

    Args:
        name: Name of the run, the same on all ranks.
        comm: ChainerMN communicator.
        cp_interval: Number of newest checkpoints that are always kept.
        gc_interval: After every so many checkpoints the others are removed.
        path: Folder of the files; the trainer's ``out`` by default.  A relative one is looked up
            once, here or when a trainer is seen first.
        allow_pickle: Whether arrays of Python objects are saved and loaded. Loading them runs
            whatever code the files hold.

    Returns:
        The extension.

    Raises:
        ValueError: On all ranks, if the name has a slash, or an interval is less than 1.
    """
    warnings.warn('The checkpointer is deprecated; use '
                  'chainermn.extensions.multi_node_snapshot instead.',
                  DeprecationWarning, stacklevel=2)
    if '/' in name or cp_interval < 1 or gc_interval < 1:
        comm.refuse('create_multi_node_checkpointer', ValueError(
            f'name has to be without a slash, and both intervals 1 or more; got {name!r}, '
            f'cp_interval={cp_interval}, gc_interval={gc_interval}'))
    return _MultiNodeCheckpointer(name, comm, cp_interval, gc_interval, path, allow_pickle)


#: By lock file, the checkpointer of this process that saved last.
_last_to_save: weakref.WeakValueDictionary[str, _MultiNodeCheckpointer] = (
    weakref.WeakValueDictionary())


class _CheckpointStats:
    """How long the checkpoints took."""

    def __init__(self) -> None:
        self.durations: list[float] = []

    def report(self) -> str:
        if not self.durations:
            return 'no checkpoints were saved'
        return (f'Snapshot duration stats (sec): avg={np.mean(self.durations):f}, '
                f'min={min(self.durations):f}, max={max(self.durations):f}')


class _MultiNodeCheckpointer(chainer.training.Extension):
    """See :func:`chainermn.create_multi_node_checkpointer`."""

    def __init__(self, name: str, comm: Any, cp_interval: int, gc_interval: int, path: str | None,
                 allow_pickle: bool) -> None:
        self.name = name
        self.cp_interval = cp_interval
        self.gc_interval = gc_interval
        self.comm = comm
        self._rank = comm.rank
        self.path: str | None = None
        self._set_path(path, None)
        self.allow_pickle = allow_pickle
        self.stats = _CheckpointStats()
        self._saver = Saver(comm, f'checkpoint {name!r}', range(comm.size), self._find_stale,
                            lambda iteration, rank: self._names.path(iteration, rank))
        self._saved = 0
        self._target: Callable[[], Any] = lambda: None  # what was saved last, if it still exists
        self._failed = False

    def initialize(self, trainer: Any) -> None:
        """Locks the files, before time is spent on training.  Collective: every rank calls it.

        Raises:
            RuntimeError: On every rank, if another job uses this name in this folder.
            ValueError: On every rank, if their names differ.
        """
        self._set_path(None, trainer)
        self._lock()

    def __call__(self, trainer: Any) -> None:
        """Saves the trainer."""
        self._set_path(None, trainer)
        self.save(trainer, trainer.updater.iteration, wait=False)

    def save(self, target: Any, iteration: int, wait: bool = True) -> None:
        """Saves an object.  Collective: every rank calls it.

        Args:
            target: Anything that Chainer can serialize, such as a trainer or a model.
            iteration: Number of the checkpoint, the same on all ranks.
            wait: Whether to return only when it is committed: on the disk on all ranks.  With False
                it returns when the state is copied in memory, and a thread writes it.

        Raises:
            OSError: On every rank, if any rank could not write this checkpoint, or the one before
                it that was saved with ``wait=False``.  The next call saves again.
            RuntimeError: On every rank, if another job uses this name in this folder.
            ValueError: On every rank, if their iterations or names differ.
            TypeError: On every rank, if the state of any holds Python objects.
            Exception: On every rank, what the target raised on any of them.
        """
        self._set_path(None, target)
        if not self._saver.lock.is_held:
            self._lock()
        names = self._names
        self._saver.wait()
        start = time.perf_counter()
        with on_all_ranks(self.comm, 'saving a checkpoint'):
            self._check_target(target)
            arrays = _snapshot_files.copy_state(target)
            if not self.allow_pickle:
                _snapshot_files.check_objects(arrays)
            buffers = _snapshot_files.buffers_of(target, arrays)
        arrays.update(_random_state.capture())
        self._saver.settle(iteration)
        self._saver.start(Save(
            iteration, names.path(iteration, None), names.path(iteration, self._rank), arrays,
            buffers,
            then=lambda: self.stats.durations.append(time.perf_counter() - start)))
        if wait:
            self._saver.conclude()

    def maybe_load(self, trainer: Any, optimizer: Any = None, path: str | None = None) -> None:
        """Loads the newest checkpoint that is whole on all ranks, if there is one.

        Collective: every rank calls it, after everything that has a state was set to the trainer.

        What was saved by another number of ranks is loaded if their models and optimizers were
        equal.  Iterators then go on in the same part of the epoch, in new orders, and the random
        numbers are not those of the run that was saved.

        Args:
            trainer: What to load into, an object of the kind that was saved.
            optimizer: Multi-node optimizer.  With it the first update after loading is an ordinary
                one; without it, it only copies rank 0's parameters to all ranks.
            path: Folder of the files, from now on.

        Raises:
            RuntimeError: On every rank, if another job uses this name in this folder.
            ValueError: On every rank, if their names differ.
            ValueError: On every rank, if the newest was saved by another number of ranks, and their
                models or optimizers differed; or if a file holds Python objects.
            Exception: On every rank, what the trainer raised on any of them.

        Warns:
            RuntimeWarning: On rank 0, of each checkpoint that was passed over, and why; and if it
                was saved by another number of ranks.
        """
        self._saver.conclude()
        wait_for_all()  # another checkpointer of this process may have saved it
        self._set_path(path, trainer)
        self._lock()
        choice = choose(self.comm, self._names, range(self.comm.size))
        if choice is None:
            return
        _loading.load(self.comm, choice, trainer, self.allow_pickle)
        if hasattr(optimizer, 'is_changed'):
            optimizer.is_changed(optimizer.target)  # remembers the parameters as seen
        self.comm.barrier()

    def get_stats(self) -> str:
        """How long saving took, as text."""
        return self.stats.report()

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        """Notes that training failed."""
        self._failed = True

    def finalize(self) -> None:
        """Waits for what is in flight, and removes the files if training ended well on all ranks.

        Raises:
            OSError: On every rank, if any rank could not write the last checkpoint.
        """
        # Trainer.run calls this in a "finally" clause, and on_error not for KeyboardInterrupt.
        if self._failed or sys.exc_info()[0] is not None:
            if failure := self._saver.failure():
                warnings.warn(f'the last checkpoint was not saved: {failure}', RuntimeWarning,
                              stacklevel=2)
            self._saver.lock.release()
            return
        if self.path is None:
            return
        if not self._saver.lock.is_held:
            self._lock()
        self._saver.settle(None)
        names = self._names
        with on_all_ranks(self.comm, 'removing checkpoints'):
            for iteration, path in names.find(None).items() if self._rank == 0 else ():
                remove_commit(path, range(self.comm.size),
                              functools.partial(names.path, iteration))
        self.comm.barrier()
        with on_all_ranks(self.comm, 'removing checkpoints'):
            for path in names.find(self._rank).values():
                _durable.remove(path)
        self._saver.lock.release()

    def _find_stale(self, save: Save) -> list[int]:
        self._saved += 1
        if self._saved % self.gc_interval:
            return []
        # An earlier run may have left later ones here, which other ranks lack.
        past = sorted(iteration for iteration in self._names.find(self._rank)
                      if iteration <= save.iteration)
        return past[:-self.cp_interval]

    def _check_target(self, target: Any) -> None:
        """Notices two checkpointers that take turns at replacing each other's files."""
        path = self._names.lock(self._rank)
        theirs = _last_to_save.get(path, self)._target()
        is_replaced = theirs is not None and theirs is not self._target()
        if is_replaced and self._target() is not None and theirs is not target:
            raise ValueError(
                f'two checkpointers named {self.name!r} save different objects to {self.path} and '
                'replace the files of one another; give them different names or folders')
        _last_to_save[path] = self
        try:
            self._target = weakref.ref(target)
        except TypeError:  # such as a dictionary
            self._target = lambda: None

    def _set_path(self, path: str | None, target: Any) -> None:
        if path is None and self.path is None:
            path = getattr(target, 'out', None)
        if path is not None:
            self.path = os.path.abspath(path)  # the program may go to another folder

    def _lock(self) -> None:
        """Keeps other jobs from these files.  Collective: every rank calls it."""
        with on_all_ranks(self.comm, 'locking checkpoints'):
            names = self._names
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(self.comm.allgather_obj(self.name)):
            ranks.setdefault(name, []).append(rank)
        if len(ranks) > 1:
            raise ValueError(
                'the ranks have different names for the checkpointer\n  '
                + '\n  '.join(f'ranks {those}: {name!r}' for name, those in ranks.items())
                + '\nPass the same name on all ranks; folders may differ.')
        self._saver.lock.acquire(names)

    @property
    def _names(self) -> Names:
        if self.path is None:
            raise TypeError('pass path= to the checkpointer, as there is no trainer with a folder')
        return Names(self.path, lambda iteration, rank: (
            f'commit-{self.name}.{iteration}' if rank is None
            else f'{self.name}.{rank}.{iteration}'))
