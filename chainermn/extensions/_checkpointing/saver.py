"""Saves the checkpoints of one extension: on each rank, a thread writes a file.

A checkpoint is in flight until all ranks have reported that they wrote their files. Then it is
complete, and all ranks remove the checkpoints that it makes obsolete.
"""
from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from chainermn._operations.on_all_ranks import on_all_ranks, raise_together
from chainermn._process.program_place import program_place
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._checkpointing import rank_file
from chainermn.extensions._checkpointing.background import BackgroundWriter
from chainermn.extensions._checkpointing.job_lock import JobLock
from chainermn.extensions._checkpointing.rank_file import Tag
from chainermn.extensions._checkpointing.save_names import SaveNames
from chainermn.extensions._checkpointing.state import CopiedState
from chainermn.extensions._replica_check import Digests

_NO_DIGESTS: Digests = {}


@dataclass
class Save:
    """One checkpoint on one rank."""

    iteration: int
    path: str
    state: CopiedState | None  # None after the write, and on ranks without a file
    compress: bool = False
    names: SaveNames | None = None  # names of this checkpoint and the ones that it makes obsolete
    on_written: Callable[[], None] = lambda: None  # called by the thread
    is_written: bool = False
    obsolete: list[int] = field(default_factory=list)  # set on rank 0, after the write


class _SaveReport(NamedTuple):
    """The report of a rank about its last checkpoint."""

    next_iteration: int | None  # iteration of the next checkpoint; None if there is no next one
    failure: str | None
    is_written: bool
    obsolete: list[int]  # only rank 0's list is used, by all ranks
    run: str
    replicas: Digests


class Saver:
    """Saves the checkpoints of one extension.

    Args:
        comm: ChainerMN communicator.
        title: Name of the saved state in error messages.
        writers: The ranks that each write a file; rank 0 is the first.
        find_obsolete: Function that returns the numbers of the checkpoints to remove once a given
            checkpoint is complete. It is called on rank 0, in the thread.
        is_alone: Whether only rank 0 writes. Then no rank waits for another one.
    """

    def __init__(self, comm: CommunicatorBase, title: str, writers: Sequence[int],
                 find_obsolete: Callable[[Save], list[int]], is_alone: bool = False) -> None:
        #: Whether some of the writers may skip a checkpoint; then rank 0 warns once.
        self.may_be_incomplete = False
        self._has_warned = False
        self.background = BackgroundWriter()
        self.lock = JobLock(comm, title, writers, is_alone)  # outlives the thread
        self._comm = comm
        self._rank, self._size = comm.rank, comm.size  # the thread must not use comm
        self._title = title
        self._writers = writers
        self._find_obsolete = find_obsolete
        self._is_alone = is_alone
        self._in_flight: Save | None = None
        self._failure: str | None = None  # error of the checkpoint in flight
        self._to_remove: list[tuple[SaveNames, int]] = []
        self._run = uuid.uuid4().hex[:16]  # replaced with rank 0's value when the ranks report
        self._count = 0

    def wait(self) -> None:
        """Wait for the thread of this rank, which then frees the memory that it uses."""
        self._failure = self.background.join() or self._failure

    def pop_failure(self) -> str | None:
        """Wait for the thread of this rank; return and clear its error."""
        self.wait()
        failure, self._failure, self._in_flight = self._failure, None, None
        return failure

    def complete(self, next_iteration: int | None, replicas: Digests = _NO_DIGESTS
                 ) -> list[Digests]:
        """Wait until all ranks have written the checkpoint in flight.

        Collective: every rank calls it.

        Args:
            next_iteration: Iteration of the next checkpoint; ``None`` if there is no next one.
            replicas: Digests of this rank's models.

        Returns:
            The digests of all ranks.

        Raises:
            OSError: On every rank, if any rank could not write the checkpoint in flight.
            ValueError: On every rank, if the ranks are at different iterations; or, unless
                ``may_be_incomplete`` is set, if only some of the writers wrote a file.
        """
        self.wait()
        save = self._in_flight
        reports = self._comm.allgather_obj(_SaveReport(
            next_iteration, self._failure, save is not None and save.is_written,
            [] if save is None else save.obsolete, self._run, replicas))
        # An error above leaves the checkpoint in flight.
        self._in_flight, self._failure = None, None
        self._run = reports[0].run
        iterations = [report.next_iteration for report in reports]
        if len(set(iterations)) > 1:
            raise on_all_ranks(self._comm, ValueError(
                f'{self._title} was not saved: the ranks are at different iterations\n'
                + ''.join(f'  rank {rank}: {"at the end" if i is None else f"iteration {i}"}\n'
                          for rank, i in enumerate(iterations))
                + 'Use a trigger that fires in the same iterations on all ranks.'))
        if failures := [f'rank {rank}: {report.failure}' for rank, report in enumerate(reports)
                        if report.failure is not None]:
            raise on_all_ranks(self._comm, not_saved(self._name_of(save), failures))
        wrote = [rank for rank, report in enumerate(reports) if report.is_written]
        if wrote and len(wrote) < len(self._writers):
            self._report_incomplete(save, wrote)
        self._set_obsolete(save, reports[0].obsolete)
        return [report.replicas for report in reports]

    def start(self, save: Save) -> None:
        """Write a checkpoint in a thread. The previous one must be complete or have failed."""
        self._count += 1
        self._in_flight = save
        tag = Tag(f'{self._run}-{self._count}', save.iteration, self._size, list(self._writers),
                  self._rank)

        def job() -> None:
            try:
                self._remove_obsolete()
                if save.state is not None:
                    save.state.late.check()
                    self._write(save, save.state, tag)
            finally:
                save.state = None  # frees the memory

        self.background.start(save.path, job,
                              first=save.state.late.finish if save.state else lambda: None)

    def flush(self) -> None:
        """Complete the checkpoint in flight and remove obsolete ones.

        Collective: every rank calls it.

        Raises:
            OSError: On every rank, if any rank could not write or remove its files.
        """
        self.complete(None)
        with raise_together(self._comm, 'removing obsolete files'):
            self._remove_obsolete()

    def _report_incomplete(self, save: Save | None, wrote: Sequence[int]) -> None:
        text = f'{self._name_of(save)} is incomplete\n' + ''.join(
            f'  rank {rank}: {"wrote a file" if rank in wrote else "wrote no file"}\n'
            for rank in self._writers)
        if not self.may_be_incomplete:
            raise on_all_ranks(self._comm, ValueError(
                f'{text}Use a condition that is the same on all ranks.'))
        if self._rank == 0 and not self._has_warned:
            warnings.warn_explicit(
                f'{text}autoload cannot resume from an incomplete snapshot. Use a condition that '
                'is the same on all ranks.', RuntimeWarning, *program_place())
        self._has_warned = True

    def _name_of(self, save: Save | None) -> str:
        return self._title if save is None else f'{self._title} of iteration {save.iteration}'

    def _write(self, save: Save, state: CopiedState, tag: Tag) -> None:
        os.makedirs(os.path.dirname(save.path), exist_ok=True)
        rank_file.write(save.path, state.arrays, tag, compress=save.compress,
                        buffers=state.buffers, own=state.own)
        save.is_written = True
        if self._rank == 0:
            save.obsolete = self._find_obsolete(save)
        if self._is_alone:
            self._set_obsolete(save, save.obsolete)
            self._remove_obsolete()
        save.on_written()

    def _set_obsolete(self, save: Save | None, numbers: Sequence[int]) -> None:
        if save is not None and save.names is not None:
            self._to_remove += [(save.names, number) for number in numbers]

    def _remove_obsolete(self) -> None:
        while self._to_remove:
            names, number = self._to_remove.pop(0)
            names.remove(number, self._rank, self._writers)


def not_saved(title: str, failures: Sequence[str]) -> OSError:
    """Return the error for a checkpoint that ranks could not write, with a line for each rank."""
    return OSError(f'{title} was not saved; earlier files are kept\n  ' + '\n  '.join(failures))
