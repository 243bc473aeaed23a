"""Saves that belong together: threads write them, the ranks agree, and rank 0 commits them.

A save is in flight until all ranks have settled it; then it is whole everywhere.  Rank 0 commits it
with the next one, in the same thread, so that nobody waits for that, or at the end.  What the
commits make superfluous is removed afterwards: the commit file first, then the files.
"""
from __future__ import annotations

import contextlib
import functools
import os
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from chainermn.extensions import _durable, _snapshot_files
from chainermn.extensions._background import Background, not_saved
from chainermn.extensions._commit import Commit, File
from chainermn.extensions._job_lock import JobLock


@dataclass
class Save:
    """One save, on one rank."""

    iteration: int
    commit_path: str
    path: str
    arrays: Mapping[str, Any] | None  # until they are written; None on a rank that writes none
    buffers: set[str]
    compress: bool = False
    then: Callable[[], None] | None = None  # called by the thread when it is written
    file: File | None = None  # what was written


#: By commit file, the save of this process that wrote its files last.  Of two extensions that save
#: the same iteration under the same name, the later one commits.
_newest: weakref.WeakValueDictionary[str, Save] = weakref.WeakValueDictionary()


class _Said(NamedTuple):
    """What a rank says when the ranks settle a save."""

    iteration: int | None  # of the next one; None at the end
    failure: str | None
    file: File | None
    stale: list[Any]
    run: str


@contextlib.contextmanager
def on_all_ranks(comm: Any, verb: str) -> Iterator[None]:
    """What is raised here on one rank is raised on all: on the others in their next operation.

    There is to be no collective operation in it.
    """
    try:
        yield
    except Exception as error:
        comm.refuse(verb, error)


class Saver:
    """The saves of one extension.

    Args:
        comm: ChainerMN communicator.
        what: What is saved, for messages.
        writers: The ranks that write a file each; rank 0 is the first.
        find_stale: Called by the thread of rank 0 after a commit: what may be removed then.
        path_of: Returns the file of such a thing that a rank writes, or of rank ``None``, its
            commit file.
        is_alone: Whether rank 0 decides by itself, as nobody else writes; it commits at once, and
            settles nothing.
    """

    def __init__(self, comm: Any, what: str, writers: Sequence[int],
                 find_stale: Callable[[Save], list[Any]],
                 path_of: Callable[[Any, int | None], str], is_alone: bool = False) -> None:
        self.background = Background()
        self.lock = JobLock(comm, what, writers, is_alone)  # ends with the thread at the earliest
        self._comm = comm
        self._rank, self._size = comm.rank, comm.size  # the thread is to make no MPI call
        self._what = what
        self._writers = list(writers)
        self._find_stale = find_stale
        self._path_of = path_of
        self._is_alone = is_alone
        self._in_flight: Save | None = None
        self._failure: str | None = None  # of that
        self._whole: Save | None = None  # settled; all ranks do not know yet that it is committed
        self._files: list[File] = []  # those of that, of all ranks
        self._committed: Save | None = None  # on rank 0
        self._stale: list[Any] = []  # whose commit rank 0 has removed since the last settling
        self._superfluous: list[str] = []  # files of this rank, whose commit is removed
        self._run = uuid.uuid4().hex[:16]  # rank 0's, once the ranks have met
        self._count = 0

    def wait(self) -> None:
        """Waits for this rank's thread, and so for the memory that it holds."""
        self._failure = self.background.join() or self._failure

    def failure(self) -> str | None:
        """Waits for this rank's thread; says what went wrong, once."""
        self.wait()
        failure, self._failure, self._in_flight = self._failure, None, None
        return failure

    def settle(self, iteration: int | None) -> None:
        """Waits until what is in flight is whole on all ranks.  Collective: every rank calls it.

        Args:
            iteration: That of the save that begins; ``None`` at the end.

        Raises:
            OSError: On every rank, if any rank could not write what is in flight.
            ValueError: On every rank, if they are at different iterations.
        """
        self.wait()
        done = self._in_flight
        said = _Said(iteration, self._failure, None if done is None else done.file, self._stale,
                     self._run)
        everyone = [_Said(*one) for one in self._comm.allgather_obj(tuple(said))]
        self._in_flight, self._failure = None, None  # not if it was refused: it is settled later
        self._run = everyone[0].run
        self._discard(everyone[0].stale)
        iterations = [one.iteration for one in everyone]
        if len(set(iterations)) > 1:
            raise ValueError(f'{self._what} was not saved: the ranks are at different iterations. '
                             'Its trigger has to fire at the same ones on all ranks.\n  '
                             + '\n  '.join(f'rank {rank}: {_name(number)}'
                                           for rank, number in enumerate(iterations)))
        if failures := [f'rank {rank}: {one.failure}' for rank, one in enumerate(everyone)
                        if one.failure is not None]:
            raise not_saved(self._name(done), failures)
        if files := [one.file for one in everyone if one.file is not None]:
            self._whole, self._files = done, files
            if len(files) < len(self._writers):
                self._whole = None
                raise ValueError(
                    f'{self._name(done)} is not whole: only ranks '
                    f'{[file.rank for file in files]} of {self._writers} wrote a file. Its '
                    'condition has to be the same on all ranks.')

    def start(self, save: Save) -> None:
        """Lets a thread write; what was in flight is settled."""
        self._count += 1
        self._in_flight = save
        if save.arrays is None and self._rank and not self._superfluous:
            return
        tag = _snapshot_files.Tag(f'{self._run}-{self._count}', save.iteration, self._size,
                                  self._writers, self._rank)

        def job() -> None:
            try:
                self._remove()
                self._commit()
                if save.arrays is not None:
                    self._write(save, tag)
            finally:
                save.arrays = None  # its memory

        self.background.start(save.path, job)

    def conclude(self) -> None:
        """Settles and commits what there is.  Collective: every rank calls it.

        Raises:
            OSError: On every rank, if any rank could not write what was in flight, or rank 0 not
                the commit file.
        """
        self.settle(None)
        if self._whole is None:
            return
        failure = None
        try:
            self._commit()
        except OSError as error:
            failure = str(error)
        failure, stale = self._comm.bcast_obj((failure, self._stale))
        if failure is not None:
            raise not_saved(self._name(self._whole), [f'rank 0: {failure}'])
        self._discard(stale)
        self._whole, self._files = None, []
        with on_all_ranks(self._comm, 'removing what is superfluous'):
            self._remove()

    def _name(self, save: Save | None) -> str:
        return self._what if save is None else f'{self._what} of iteration {save.iteration}'

    def _write(self, save: Save, tag: _snapshot_files.Tag) -> None:
        assert save.arrays is not None
        os.makedirs(os.path.dirname(save.path), exist_ok=True)
        _newest[save.commit_path] = save
        if self._rank == 0:
            _durable.remove(save.commit_path)  # of an earlier file of this name
        written = _snapshot_files.write(save.path, save.arrays, save.compress, tag, save.buffers)
        save.file = File.of(save.path, written)
        if self._is_alone:
            self._whole, self._files = save, [save.file]
            self._commit()
            self._discard(self._stale)
            self._remove()
        if save.then is not None:
            save.then()

    def _commit(self) -> None:
        """Writes the commit file of what is whole, and removes those of what is superfluous."""
        save = self._whole
        if self._rank or save is None or save is self._committed:
            return
        if _newest.get(save.commit_path) is not save:
            return
        try:
            Commit(save.iteration, self._size, self._files).write(save.commit_path)
        except OSError as error:
            raise OSError(f'{save.commit_path}: {error}') from error
        self._committed = save
        stale = self._find_stale(save)
        for one in stale:
            path = self._path_of(one, None)
            if self._in_flight is not None and path == self._in_flight.commit_path:
                continue  # it is being written anew
            remove_commit(path, self._writers, functools.partial(self._path_of, one))
            self._stale.append(one)

    def _discard(self, stale: list[Any]) -> None:
        self._stale = []
        if self._rank in self._writers:
            self._superfluous += [self._path_of(one, self._rank) for one in stale]

    def _remove(self) -> None:
        while self._superfluous:
            _durable.remove(self._superfluous.pop(0))


def remove_commit(path: str, writers: Sequence[int], path_of: Callable[[int], str]) -> None:
    """Removes a commit file, and files of ranks that this job has not, as it had more then.

    Args:
        path: The commit file.
        writers: The ranks that remove their files themselves.
        path_of: Returns the file of a rank; others are left alone.
    """
    try:
        files = Commit.read(path).files
    except (OSError, ValueError):
        files = []
    _durable.remove(path)
    for file in files:
        if file.rank not in writers and file.name == os.path.basename(path_of(file.rank)):
            _durable.remove(path_of(file.rank))


def _name(iteration: int | None) -> str:
    return 'the end' if iteration is None else f'iteration {iteration}'
