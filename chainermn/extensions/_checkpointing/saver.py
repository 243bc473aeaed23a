"""The saves of one extension: threads write the files, then rank 0 writes the manifest.

A save is in flight until all ranks have reported that they wrote their files; then it is complete.
Rank 0 writes the manifest of a complete save in the thread of the next save, so no rank waits for
it, or at the end.  Saves that are obsolete then are removed: first the manifest, then the files.
"""
from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from chainermn import _runtime
from chainermn._failures.on_all_ranks import on_all_ranks, raise_on_all_ranks
from chainermn._system.atomic_file import remove
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._checkpointing import rank_file
from chainermn.extensions._checkpointing.background import BackgroundWriter
from chainermn.extensions._checkpointing.lock import JobLock
from chainermn.extensions._checkpointing.manifest import Manifest, SaveName, remove_manifest
from chainermn.extensions._checkpointing.rank_file import FileRecord, Tag


@dataclass
class Save:
    """One save, on one rank."""

    iteration: int
    manifest_path: str
    path: str
    arrays: Mapping[str, np.ndarray] | None  # until they are written; None on a rank without file
    buffers: set[str] = field(default_factory=set)
    compress: bool = False
    on_written: Callable[[], None] | None = None  # called by the thread
    record: FileRecord | None = None  # once the file is written
    has_manifest: bool = False  # on rank 0



class _Saves(_runtime.Part):
    """By manifest, the save of this process that wrote its files last.

    If two extensions save the same iteration under the same name, the later one writes the
    manifest.
    """

    def __init__(self) -> None:
        self.newest: weakref.WeakValueDictionary[str, Save] = weakref.WeakValueDictionary()


class _SaveReport(NamedTuple):
    """What a rank reports about its last save."""

    next_iteration: int | None  # of the next save; None at the end
    failure: str | None
    record: FileRecord | None
    obsolete: list[SaveName]  # only those of rank 0 count
    run: str


class Saver:
    """The saves of one extension.

    Args:
        comm: ChainerMN communicator.
        title: Name of the saved state in errors.
        writers: The ranks that write a file each; rank 0 is the first.
        find_obsolete: Function that returns which saves to remove, once a save has its manifest.
            Called on rank 0, by its thread.
        is_alone: Whether only rank 0 writes.  Then it writes the manifest at once, and no rank
            waits for another.
    """

    def __init__(self, comm: CommunicatorBase, title: str, writers: Sequence[int],
                 find_obsolete: Callable[[Save], list[SaveName]], is_alone: bool = False) -> None:
        self.background = BackgroundWriter()
        self.lock = JobLock(comm, title, writers, is_alone)  # outlives the thread
        self._comm = comm
        self._rank, self._size = comm.rank, comm.size  # the thread must not use comm
        self._title = title
        self._writers = list(writers)
        self._find_obsolete = find_obsolete
        self._is_alone = is_alone
        self._folder = ''
        self._in_flight: Save | None = None
        self._failure: str | None = None  # of the save in flight
        self._complete: Save | None = None  # all ranks know that, but not that it has a manifest
        self._records: list[FileRecord] = []  # of the complete save, by rank
        self._obsolete: list[SaveName] = []  # rank 0 removed the manifest, the ranks do not know
        self._to_remove: list[str] = []  # files of this rank in obsolete saves
        self._run = uuid.uuid4().hex[:16]  # rank 0's, once the ranks have reported
        self._count = 0

    def wait(self) -> None:
        """Wait for the thread of this rank, which frees the memory that it uses."""
        self._failure = self.background.join() or self._failure

    def pop_failure(self) -> str | None:
        """Wait for the thread of this rank; return its error, once."""
        self.wait()
        failure, self._failure, self._in_flight = self._failure, None, None
        return failure

    def complete(self, next_iteration: int | None) -> None:
        """Wait until all ranks have written the save in flight.  Collective: every rank calls it.

        Args:
            next_iteration: Iteration of the next save; ``None`` at the end.

        Raises:
            OSError: On every rank, if any rank could not write the save in flight.
            ValueError: On every rank, if they are at different iterations, or if only some of the
                writers wrote a file.
        """
        self.wait()
        save = self._in_flight
        reports = self._comm.allgather_obj(_SaveReport(
            next_iteration, self._failure, None if save is None else save.record, self._obsolete,
            self._run))
        # An error above leaves the save in flight.
        self._in_flight, self._failure = None, None
        self._run = reports[0].run
        self._set_obsolete(reports[0].obsolete)
        iterations = [report.next_iteration for report in reports]
        if len(set(iterations)) > 1:
            raise on_all_ranks(self._comm, ValueError(
                f'{self._title} was not saved: the ranks are at different iterations\n'
                + ''.join(f'  rank {rank}: {"the end" if i is None else f"iteration {i}"}\n'
                          for rank, i in enumerate(iterations))
                + 'Use a trigger that fires in the same iterations on all ranks.'))
        if failures := [f'rank {rank}: {report.failure}' for rank, report in enumerate(reports)
                        if report.failure is not None]:
            raise on_all_ranks(self._comm, not_saved(self._name_of(save), failures))
        if records := [report.record for report in reports if report.record is not None]:
            self._complete, self._records = save, records
            if len(records) < len(self._writers):
                self._complete = None
                wrote = {record.rank for record in records}
                raise on_all_ranks(self._comm, ValueError(
                    f'{self._name_of(save)} is incomplete\n' + ''.join(
                        f'  rank {rank}: {"wrote a file" if rank in wrote else "wrote no file"}\n'
                        for rank in self._writers)
                    + 'Use a condition that is the same on all ranks.'))

    def start(self, save: Save) -> None:
        """Start a save in a thread.  The save before must be complete, or have failed."""
        self._count += 1
        self._in_flight = save
        if save.arrays is None and self._rank and not self._to_remove:
            return
        tag = Tag(f'{self._run}-{self._count}', save.iteration, self._size, self._writers,
                  self._rank)

        def job() -> None:
            try:
                self._remove_files()
                self._write_manifest()
                if save.arrays is not None:
                    self._write(save, save.arrays, tag)
            finally:
                save.arrays = None  # frees the memory

        self.background.start(save.path, job)

    def flush(self) -> None:
        """Complete the save in flight and write its manifest.  Collective: every rank calls it.

        Raises:
            OSError: On every rank, if any rank could not write its file, or rank 0 the manifest.
        """
        self.complete(None)
        if self._complete is None:
            return
        failure = None
        try:
            self._write_manifest()
        except OSError as error:
            failure = str(error)
        failure, obsolete = self._comm.bcast_obj((failure, self._obsolete))
        if failure is not None:
            raise on_all_ranks(self._comm, not_saved(
                self._name_of(self._complete), [f'rank 0: {failure}']))
        self._set_obsolete(obsolete)
        self._complete, self._records = None, []
        with raise_on_all_ranks(self._comm, 'removing obsolete files'):
            self._remove_files()

    def _name_of(self, save: Save | None) -> str:
        return self._title if save is None else f'{self._title} of iteration {save.iteration}'

    def _write(self, save: Save, arrays: Mapping[str, np.ndarray], tag: Tag) -> None:
        self._folder = os.path.dirname(save.path)
        os.makedirs(self._folder, exist_ok=True)
        _runtime.get(_Saves).newest[save.manifest_path] = save
        if self._rank == 0:
            remove(save.manifest_path)  # of an earlier save with this name
        save.record = rank_file.write(save.path, arrays, tag, compress=save.compress,
                                      buffers=save.buffers)
        if self._is_alone:
            self._complete, self._records = save, [save.record]
            self._write_manifest()
            self._set_obsolete(self._obsolete)
            self._remove_files()
        if save.on_written is not None:
            save.on_written()

    def _write_manifest(self) -> None:
        """On rank 0: writes the manifest of the complete save; removes those of obsolete saves."""
        save = self._complete
        if self._rank or save is None or save.has_manifest:
            return
        if _runtime.get(_Saves).newest.get(save.manifest_path) is not save:
            return
        try:
            Manifest(save.iteration, self._size, self._records).write(save.manifest_path)
        except OSError as error:
            raise OSError(f'{save.manifest_path}: {error}') from error
        save.has_manifest = True
        folder = os.path.dirname(save.manifest_path)
        for name in self._find_obsolete(save):
            if self._in_flight is not None and (
                    os.path.join(folder, name.manifest) == self._in_flight.manifest_path):
                continue  # this save is being replaced
            remove_manifest(folder, name, self._writers)
            self._obsolete.append(name)

    def _set_obsolete(self, names: list[SaveName]) -> None:
        self._obsolete = []
        if self._rank in self._writers:
            self._to_remove += [os.path.join(self._folder, name.file(self._rank))
                                for name in names]

    def _remove_files(self) -> None:
        while self._to_remove:
            remove(self._to_remove.pop(0))


def not_saved(title: str, failures: Sequence[str]) -> OSError:
    """Return the error for a save that ranks could not write; a line for each of them."""
    return OSError(f'{title} was not saved; earlier saves are kept\n  ' + '\n  '.join(failures))
