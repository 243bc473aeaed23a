"""Removes the files of a training run that is complete.

A later step may still fail, such as saving the model. Therefore, the files are kept until all ranks
have exited without an error, or until the same process starts another training run with the same
name and folder.
"""
from __future__ import annotations

import warnings

from chainermn._operations.on_all_ranks import raise_together
from chainermn._process import clean_end, runtime
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions._checkpointing.job_lock import JobLock
from chainermn.extensions._checkpointing.save_names import SaveNames


class _CompletedRuns(runtime.ProcessState):
    """The completed training runs of this process."""

    def __init__(self) -> None:
        self.runs: dict[str, _CompletedRun] = {}  # by lock file


def remove_files(comm: CommunicatorBase, names: SaveNames) -> None:
    """Remove all files of a training run. Collective: every rank calls it."""
    with raise_together(comm, 'removing checkpoints'):
        _remove_own_files(comm, names)


def remove_at_end(comm: CommunicatorBase, names: SaveNames, lock: JobLock) -> None:
    """Remove all files once all ranks have reached the end of the script without an error.

    If the ranks cannot find out whether the others have failed, remove the files immediately.

    Collective: every rank calls it.

    Args:
        comm: ChainerMN communicator.
        names: Names of the files.
        lock: Lock of the files; it is released at the same time.
    """
    if hasattr(comm, '_flight_records'):
        _CompletedRun(comm, names, lock)
    else:  # a third-party communicator, whose ranks cannot find out whether others have failed
        remove_files(comm, names)
        lock.release()


def remove_completed(comm: CommunicatorBase, names: SaveNames) -> bool:
    """Remove the files of the completed training run with these names, if there is one.

    Collective: every rank calls it.

    Returns:
        Whether there was such a run.
    """
    run = runtime.get(_CompletedRuns).runs.get(names.lock_path(comm.rank))
    if run is not None:
        run.remove()
    return run is not None


class _CompletedRun:
    """See :func:`remove_at_end`."""

    def __init__(self, comm: CommunicatorBase, names: SaveNames, lock: JobLock) -> None:
        self._comm = comm
        self._names = names
        self._release = lock.release
        lock.keep_until_released()  # the files are removed after the interpreters have exited
        self._key = names.lock_path(comm.rank)
        runtime.get(_CompletedRuns).runs[self._key] = self
        clean_end.add(self._end)

    def remove(self) -> None:
        clean_end.remove(self._end)
        del runtime.get(_CompletedRuns).runs[self._key]
        remove_files(self._comm, self._names)
        self._release()

    def _end(self) -> None:
        """Remove the files with plain MPI, because the communicator is no longer usable."""
        mpi_comm, problem = self._comm.mpi_comm, ''
        try:
            mpi_comm.Barrier()  # without consistency checks, another rank may still be running
            try:
                _remove_own_files(self._comm, self._names)
            except OSError as error:
                problem = f'rank {self._comm.rank}: {error}'
            self._release()
            problems = mpi_comm.gather(problem) or []  # on rank 0
        except Exception as error:
            problems = [str(error)]
        if any(problems):
            warnings.warn(f'could not remove the checkpoints in {self._names.folder}\n  '
                          + '\n  '.join(filter(None, problems))
                          + '\nTraining is complete, so you can delete them.',
                          RuntimeWarning, stacklevel=2)


def _remove_own_files(comm: CommunicatorBase, names: SaveNames) -> None:
    for number in names.find(comm.rank):  # the oldest first, in case the job is killed now
        names.remove(number, comm.rank, range(comm.size))
