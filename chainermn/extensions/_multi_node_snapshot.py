"""Snapshots of several ranks, with one file for each set of replicas."""
from __future__ import annotations

import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import chainer
import numpy as np
from chainer.training.extensions import _snapshot as chainer_snapshot
from chainer.training.extensions import snapshot_writers

from chainermn._operations import common_error
from chainermn._operations.on_all_ranks import check_equal, raise_on_all_ranks, raise_together
from chainermn._process.program_place import program_place
from chainermn._types import Object
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._calls import called_by
from chainermn.extensions._checkpointing import resume
from chainermn.extensions._checkpointing.background import wait_for_all
from chainermn.extensions._checkpointing.parts import SavedParts
from chainermn.extensions._checkpointing.save_names import NamePattern, SaveNames
from chainermn.extensions._checkpointing.saver import Save, Saver, not_saved
from chainermn.extensions._checkpointing.selection import select
from chainermn.extensions._checkpointing.snapshot_arguments import check_order, parse_replica_sets
from chainermn.extensions._checkpointing.state import CopiedState


def multi_node_snapshot(comm: CommunicatorBase, snapshot: chainer_snapshot._Snapshot,
                        replica_sets: Iterable[int | Iterable[int]] = (), *,
                        allow_pickle: bool = False, allow_other_classes: bool = False
                        ) -> _MultiNodeSnapshot:
    """Make a snapshot extension write one file for each set of ranks with the same state.

    The lowest rank of each set writes ``<file name>.<rank>``. With ``autoload``, all sets resume
    at the newest snapshot that is complete for every set. The writing rank reads the file and sends
    it to the other ranks of its set, so nodes need no shared folder. docs/checkpoints.md lists all
    guarantees.

    Training stops only while the state is copied in memory. A thread writes the copy in the format
    of ``chainer.serializers.save_npz``. At the next snapshot, or at the end of training, the
    extension waits until the file is on disk. If writing failed, the writing ranks then raise an
    OSError, and the other ranks raise it in their next collective operation of ``comm``.

    A snapshot with a ``writer`` or ``savefun`` other than Chainer's defaults (``SimpleWriter``,
    ``save_npz``) is written by that writer or function while training waits, without a checksum or
    a lock. In all other cases, the files are locked during training: another job that writes
    snapshots with the same name to the same folder gets an error that shows which job has the lock.

    With several sets and the default writer, all ranks compare the iteration at every snapshot, so
    the trigger must fire in the same iterations on all ranks. The condition of the snapshot should
    also be true in the same iterations on all ranks. If it is not, all ranks raise a ValueError
    with ``autoload``; without ``autoload``, rank 0 warns once. Files beyond ``n_retains`` are
    removed once all sets have written a newer file.

    In data-parallel training, all ranks are replicas of each other. A different number of ranks can
    resume from such a snapshot; see ``maybe_load`` of the checkpointer.

    Args:
        comm: ChainerMN communicator.
        snapshot: Extension that ``chainer.training.extensions.snapshot`` or ``snapshot_object``
            returned.
        replica_sets: Sets of ranks with the same state. Pass the same sets on all ranks. A set is
            any iterable of ranks, or one rank. The remaining ranks form another set: on four ranks,
            ``[[0, 1]]`` means ``{0, 1}`` and ``{2, 3}``, and ``[0]`` means ``{0}`` and
            ``{1, 2, 3}``. By default, all ranks form one set.
        allow_pickle: Whether to save and load arrays of Python objects. Loading them runs any code
            that the files contain.
        allow_other_classes: Whether to load a snapshot whose models, optimizers, update rules or
            iterators have different classes. States with the same names are then loaded, even if
            their meanings differ.

    Returns:
        The extension, with the trigger and priority of ``snapshot``. Its attribute ``is_master``
        tells whether this rank writes. Its attribute ``snapshot`` is the argument, whose
        ``filename`` now ends in ``.<rank>``. The condition and the writer of the snapshot are only
        called on ranks that write.

    Raises:
        AssertionError: If a rank is in two sets or does not exist.
        TypeError: If an argument has the wrong type, for example because two are swapped.
        ValueError: With ``autoload``, if the iteration cannot be read from the file name, for
            example because ``filename`` is a function.

    Example:
        >>> snapshot = chainer.training.extensions.snapshot(n_retains=3, autoload=True)
        >>> snapshot = chainermn.extensions.multi_node_snapshot(comm, snapshot)
        >>> trainer.extend(snapshot, trigger=(2, 'iteration'))
        >>> trainer.run()
    """
    check_order(comm, snapshot, replica_sets)
    return _MultiNodeSnapshot(comm, snapshot, replica_sets, allow_pickle, allow_other_classes)


class _MultiNodeSnapshot(chainer.training.Extension):
    """See :func:`multi_node_snapshot`."""

    def __init__(self, comm: CommunicatorBase, snapshot: chainer_snapshot._Snapshot,
                 replica_sets: Iterable[int | Iterable[int]], allow_pickle: bool,
                 allow_other_classes: bool) -> None:
        self.comm = comm = as_communicator(
            comm, 'multi_node_snapshot(comm, snapshot, replica_sets)')
        self.snapshot = snapshot
        with raise_on_all_ranks(comm, 'multi_node_snapshot'):
            sets = parse_replica_sets(replica_sets, comm.size)
        self._sets = sorted(map(sorted, sets))
        self.replica_set = next(ranks for ranks in sets if comm.rank in ranks)
        self._writers = sorted(min(ranks) for ranks in sets)
        self._is_alone = len(sets) == 1
        self.master = min(self.replica_set)
        self.is_master = comm.rank == self.master
        # Like ChainerMN 7, accept any object with a `filename`, even if it lacks other attributes.
        self.trigger = getattr(snapshot, 'trigger', chainer.training.Extension.trigger)
        self.priority = getattr(snapshot, 'priority', chainer.training.Extension.priority)
        self.name = getattr(snapshot, 'name', None)
        self._pattern = NamePattern.of(snapshot.filename)
        if self.autoload and self._pattern is None:
            kind = 'a function' if callable(snapshot.filename) else repr(snapshot.filename)
            comm.refuse('multi_node_snapshot', ValueError(
                f'autoload must read the iteration of a file from its name, but the file name is '
                f'{kind}. Pass a file name with one integer field, such as '
                '"snapshot_iter_{.updater.iteration}", or without fields.'))
        self._allow_pickle = allow_pickle
        self._allow_other_classes = allow_other_classes
        snapshot.filename = _with_rank(snapshot.filename, comm.rank)
        self._out: str | None = None
        self._folder = ''  # absolute path of `_out`, computed when `_out` is set
        self._saver = Saver(comm, 'a snapshot', self._writers, self._find_obsolete, self._is_alone)
        self._writer: _TakingWriter | None = None
        if _TakingWriter.can_replace(getattr(snapshot, 'writer', None)):
            snapshot.writer = self._writer = _TakingWriter(snapshot.writer)
        #: Whether all ranks take part in each snapshot.
        self._is_collective = self._writer is not None and not self._is_alone

    @property
    def autoload(self) -> bool:
        """Whether a snapshot is loaded before other extensions are initialized."""
        return getattr(self.snapshot, 'autoload', False)

    @called_by('multi_node_snapshot')
    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Lock the files; resume if ``autoload`` is set. Collective: every rank calls it.

        Raises:
            RuntimeError: On every rank, if another job uses this file name in this folder.
        """
        self._out = None
        self._look_up_folder(trainer)
        autoload = self.autoload
        if self._is_collective or autoload:
            check_equal(self.comm, self.comm.allgather_obj(self._sets),
                        'the ranks have different replica_sets',
                        'Pass the same replica_sets on all ranks.')
        with raise_on_all_ranks(self.comm, 'multi_node_snapshot'):
            if len(self.replica_set) > 1 and SavedParts(self._target(trainer)).sharded:
                raise ValueError(
                    'with shard_states=True or update_on_kvstore=True, each rank has its own part '
                    'of the optimizer states, so multi_node_snapshot needs replica sets of one '
                    'rank each. Pass replica_sets=[[rank] for rank in range(comm.size)], or '
                    'use chainermn.create_multi_node_checkpointer.')
        if self._is_collective:
            self._saver.complete(None)
        is_ours = self._writer is not None and self._pattern is not None
        with raise_on_all_ranks(self.comm, 'multi_node_snapshot'):
            if is_ours and self.is_master:
                self._names.check_no_folder(self.comm.rank)
        if is_ours and (self.is_master or not self._is_alone):
            self._saver.lock.acquire(self._names, must_write=True)
        if autoload:
            self._load(trainer)
        if self.is_master:
            if autoload:
                self.snapshot.autoload = False  # because the state has already been loaded
            if hasattr(self.snapshot, 'initialize'):
                self.snapshot.initialize(trainer)
            if autoload:
                self.snapshot.autoload = True

    @called_by('multi_node_snapshot')
    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Take a snapshot on ranks that write.

        Collective with several sets and the default writer: every rank calls it.

        Raises:
            OSError: If a rank could not write the last snapshot.
            ValueError: With several sets, on every rank, if the ranks are at different iterations.
            Exception: If a rank cannot serialize its state.
        """
        self._look_up_folder(trainer)
        self._saver.wait()
        raises = raise_together if self._is_collective else raise_on_all_ranks
        with raises(self.comm, 'taking a snapshot'):
            save = self._take(trainer, self.snapshot) if self.is_master else None
        self._complete(trainer.updater.iteration)
        if save is not None:
            self._saver.start(save)
        elif self._is_collective:
            self._saver.start(Save(trainer.updater.iteration, '', None))

    def on_error(self, trainer: chainer.training.Trainer, exc: Exception,
                 tb: types.TracebackType) -> None:
        """Take a snapshot if ``snapshot_on_error`` is set. Not collective."""
        self._look_up_folder(trainer)
        self._warn_of_failure()
        if self.is_master and hasattr(self.snapshot, 'on_error'):
            save = self._take(trainer, lambda t: self.snapshot.on_error(t, exc, tb))
            if save is not None:
                self._saver.start(save)

    @called_by('multi_node_snapshot')
    def finalize(self) -> None:
        """Wait for the last snapshot; unlock the files.

        Collective with several sets and the default writer: every rank calls it.
        """
        # Each rank's writer may have started a process.
        started = self.snapshot if self.is_master else getattr(self.snapshot, 'writer', None)
        finalize = getattr(started, 'finalize', None)
        if finalize is not None:
            finalize()
        if sys.exc_info()[0] is None:
            self._complete(None)
        else:  # Trainer.run calls this in a "finally" clause
            self._warn_of_failure()
        self._saver.lock.release()

    def _look_up_folder(self, trainer: chainer.training.Trainer) -> None:
        if trainer.out != self._out:  # only once, because user code may change the directory
            self._out, self._folder = trainer.out, os.path.abspath(trainer.out)

    @property
    def _names(self) -> SaveNames:
        assert self._pattern is not None
        folder, prefix = os.path.split(self._pattern.prefix)
        return SaveNames(os.path.join(self._folder, folder),
                         self._pattern._replace(prefix=prefix).file_name)

    def _complete(self, next_iteration: int | None) -> None:
        """Wait until the last snapshot is on disk; raise its error on all ranks."""
        if self._is_collective:
            self._saver.may_be_incomplete = not self.autoload  # as in ChainerMN 7
            if next_iteration is None:
                self._saver.flush()
            else:
                self._saver.complete(next_iteration)
        elif failure := self._saver.pop_failure():
            # Apart from errors, the ranks do not communicate: a trigger that reads the clock may
            # fire on the writing rank only, and a rank may finish earlier, as in join().
            error = not_saved('a snapshot', [f'rank {self.comm.rank}: {failure}'])
            common_error.mark_complete(error)
            self.comm.refuse('writing', error)

    def _warn_of_failure(self) -> None:
        if failure := self._saver.pop_failure():
            warnings.warn_explicit(f'the last snapshot was not saved: {failure}', RuntimeWarning,
                                   *program_place())

    def _take(self, trainer: chainer.training.Trainer,
              snapshot: Callable[[chainer.training.Trainer], object]) -> Save | None:
        """Call Chainer's snapshot; copy the state that it passed to our writer."""
        snapshot(trainer)
        if self._writer is None or self._writer.taken is None:
            return None
        (filename, arrays), self._writer.taken = self._writer.taken, None
        return Save(
            trainer.updater.iteration, os.path.join(self._folder, filename),
            CopiedState.of(SavedParts(self._target(trainer)), self._allow_pickle, arrays),
            self._writer.compress, names=None if self._pattern is None else self._names)

    def _target(self, trainer: chainer.training.Trainer) -> object:
        target = getattr(self.snapshot, '_target', None)
        return trainer if target is None else target

    def _find_obsolete(self, save: Save) -> list[int]:
        """Return all snapshots except the newest ``n_retains``, by modification time."""
        if self.snapshot.n_retains <= 0 or self._pattern is None:
            return []
        files = self._names.find(self.master)
        by_time = sorted(files, key=lambda number: os.stat(files[number]).st_mtime)
        return by_time[:-self.snapshot.n_retains]

    def _load(self, trainer: chainer.training.Trainer) -> None:
        wait_for_all()  # an earlier trainer of this process may still be writing the snapshot
        selection = select(self.comm, self._names, self._writers)
        if selection is None:
            return
        with raise_together(self.comm, 'loading'):
            parts = SavedParts(self._target(trainer))
        group = self.comm.split(self.master, self.comm.rank)
        resume.load(self.comm, selection, parts, self._allow_pickle, group,
                    self._allow_other_classes, f'the snapshots in {self._folder}')
        group.finalize()
        for part in parts.all.values():
            if hasattr(part, 'is_changed'):
                part.is_changed(part.target)  # so that the first update changes the parameters


class _TakingWriter(snapshot_writers.Writer):
    """Replaces Chainer's default writer: keeps the state, which :class:`Saver` then writes."""

    def __init__(self, writer: snapshot_writers.SimpleWriter) -> None:
        super().__init__()
        self.compress = writer._kwds.get('compression', True)
        self.taken: tuple[str, dict[str, np.ndarray]] | None = None  # file name, state

    @staticmethod
    def can_replace(writer: Object) -> bool:
        """Return whether a writer is Chainer's default writer with the default format."""
        return (type(writer) is snapshot_writers.SimpleWriter
                and writer._savefun is chainer.serializers.save_npz
                and set(writer._kwds) <= {'compression'})

    def __call__(self, filename: str, outdir: str, target: Mapping[str, np.ndarray]) -> None:
        """Keep a state for a file with this name."""
        self.taken = filename, dict(target)

    def _add_cleanup_hook(self, hook_fun: Callable[..., None]) -> None:
        """Ignore Chainer's hook for ``n_retains``, because Saver removes the files."""


_Filename: TypeAlias = str | Callable[[chainer.training.Trainer], str]


def _with_rank(filename: _Filename, rank: int) -> _Filename:
    if callable(filename):
        return lambda trainer: f'{filename(trainer)}.{rank}'
    return f'{filename}.{rank}'
