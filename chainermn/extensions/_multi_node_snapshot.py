"""Snapshots of several ranks: one file for each set of replicas."""
from __future__ import annotations

import operator
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import chainer
from chainer.training.extensions import _snapshot as chainer_snapshot
from chainer.training.extensions import snapshot_writers

from chainermn.extensions import _background, _loading, _snapshot_files
from chainermn.extensions._choose import choose
from chainermn.extensions._commit import Names
from chainermn.extensions._saver import Save, Saver, on_all_ranks


def multi_node_snapshot(comm: Any, snapshot: Any, replica_sets: Iterable[int | Iterable[int]], *,
                        allow_pickle: bool = False) -> Any:
    """Makes a snapshot extension write one file for each set of ranks that hold the same state.

    The rank with the lowest number in a set writes ``<file name>.<rank>``.  Once the files of all
    sets are on the disk, rank 0 writes ``commit-<file name>``, with their sizes and checksums.
    With ``autoload`` all sets resume at the newest snapshot that every set has whole; the writing
    rank reads it and sends it to the other ranks of its set, so the folder need not be shared
    between nodes.  docs/checkpoints.md says what is promised, and when.

    Training stops only while the state is copied in memory; a thread writes the copy, in the format
    of ``chainer.serializers.save_npz``, and it is on the disk at the next snapshot and at the end
    of the training. An error of writing is an OSError there: it is raised on every rank, on those
    that do not write in their next collective operation of ``comm``. A snapshot with a ``writer``
    or a ``savefun`` other than Chainer's default (``SimpleWriter``, ``save_npz``) is written by
    that, while training waits, and has no commit file. From the beginning to the end of the
    training the others are locked: another job that writes snapshots of the same name to the same
    folder gets an error that says which job has them.

    With several sets and the default writer all ranks compare the iteration at every snapshot, so
    it has to be triggered in the same iterations on all; and the files that ``n_retains`` gives up
    are removed once all sets have the newer one.

    In data-parallel training all ranks are replicas of one another:

    >>> snapshot = extensions.snapshot(n_retains=3, autoload=True)            # doctest: +SKIP
    >>> trainer.extend(multi_node_snapshot(comm, snapshot, []),               # doctest: +SKIP
    ...                trigger=(1000, 'iteration'))

    Another number of ranks can go on from it; see ``maybe_load`` of the checkpointer.

    Args:
        comm: ChainerMN communicator.
        snapshot: What ``chainer.training.extensions.snapshot`` or ``snapshot_object`` returns.
        replica_sets: Sets of ranks with the same state, the same on all ranks.  A set is any
            iterable of ranks, or one rank.  Ranks that are in none form another set: on four ranks
            ``[[0, 1]]`` means ``{0, 1}`` and ``{2, 3}``, ``[0]`` means ``{0}`` and ``{1, 2, 3}``,
            and ``[]`` means one set of all.
        allow_pickle: Whether arrays of Python objects are saved and loaded.  Loading them runs
            whatever code the files hold.

    Returns:
        The extension; trigger and priority are those of ``snapshot``.  ``is_master`` says whether
        this rank writes.  ``snapshot`` is the argument, whose ``filename`` now ends in ``.<rank>``;
        its condition and its writer are called on the masters only.

    Raises:
        AssertionError: If a rank is in two sets, or there is no such rank.
        TypeError: If ``replica_sets`` holds anything but ranks and iterables of ranks.
        ValueError: If the file name is a function, with ``autoload``.
    """
    return _MultiNodeSnapshot(comm, snapshot, replica_sets, allow_pickle)


class _MultiNodeSnapshot(chainer.training.Extension):
    """See :func:`multi_node_snapshot`."""

    def __init__(self, comm: Any, snapshot: Any, replica_sets: Iterable[int | Iterable[int]],
                 allow_pickle: bool) -> None:
        self.comm = comm
        self.snapshot = snapshot
        try:
            sets = _parse_replica_sets(replica_sets, comm.size)
        except Exception as error:
            comm.refuse('multi_node_snapshot', error)
        self._sets = sorted(map(sorted, sets))
        self.replica_set = next(ranks for ranks in sets if comm.rank in ranks)
        self._writers = sorted(min(ranks) for ranks in sets)
        self._is_alone = len(sets) == 1
        self.master = min(self.replica_set)
        self.is_master = comm.rank == self.master
        self.trigger = snapshot.trigger
        self.priority = snapshot.priority
        self.name = snapshot.name
        if snapshot.autoload and callable(snapshot.filename):
            comm.refuse('multi_node_snapshot', ValueError(
                'autoload takes a file name such as "snapshot_iter_{.updater.iteration}", not a '
                'function: the iteration of a file has to be read from its name'))
        self._allow_pickle = allow_pickle
        self._filename = snapshot.filename
        snapshot.filename = _with_rank(snapshot.filename, comm.rank)
        self._out: str | None = None
        self._folder = ''  # where that was when it was seen first
        self._saver = Saver(comm, 'a snapshot', self._writers, self._find_stale, self._path_of,
                            self._is_alone)
        self._writer: _Writer | None = None
        if _Writer.can_replace(snapshot.writer):
            snapshot.writer = self._writer = _Writer(
                snapshot.writer, self._saver.background.wait, allow_pickle)
        self._is_settled = self._writer is not None and not self._is_alone

    def initialize(self, trainer: Any) -> None:
        """Locks the files; resumes with ``autoload``.  Collective: every rank calls it.

        Raises:
            RuntimeError: On every rank, if another job uses this file name in this folder.
        """
        self._out = None
        self._look_up_folder(trainer)
        autoload = self.snapshot.autoload
        if self._is_settled or autoload:
            _check_equal(self.comm.allgather_obj(self._sets))
        if self._is_settled:
            self._saver.settle(None)  # the ranks meet
        is_ours = self._writer is not None and not callable(self._filename)
        if is_ours and (self.is_master or not self._is_alone):
            self._saver.lock.acquire(self._names)
        if autoload:
            self._load(trainer)
        if self.is_master:
            self.snapshot.autoload = False  # the file is chosen
            self.snapshot.initialize(trainer)
            self.snapshot.autoload = autoload

    def __call__(self, trainer: Any) -> None:
        """Takes a snapshot, on the masters.  Collective if there are several sets.

        Raises:
            OSError: If a rank could not write the last one.
            ValueError: With several sets, on every rank, if they are not in the same iteration.
            Exception: What the state of a rank raised when it was serialized.
        """
        self._look_up_folder(trainer)
        self._saver.wait()
        with on_all_ranks(self.comm, 'taking a snapshot'):
            save = self._taken(trainer, self.snapshot) if self.is_master else None
        self._settle(trainer.updater.iteration)
        if save is not None:
            self._saver.start(save)
        elif self._is_settled:
            self._saver.start(Save(trainer.updater.iteration, '', '', None, set()))

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        """Takes a snapshot if it has ``snapshot_on_error``, on each rank by itself."""
        self._look_up_folder(trainer)
        self._warn_of_failure()
        if self.is_master:
            save = self._taken(trainer, lambda t: self.snapshot.on_error(t, exc, tb))
            if save is not None:
                self._saver.start(save)

    def finalize(self) -> None:
        """Waits for the last snapshot, and unlocks.  Collective if there are several sets."""
        if self.is_master:
            self.snapshot.finalize()
        if sys.exc_info()[0] is None:
            self._settle(None)
        else:  # Trainer.run calls this in a "finally" clause
            self._warn_of_failure()
        self._saver.lock.release()

    def _look_up_folder(self, trainer: Any) -> None:
        if trainer.out != self._out:  # once, as the program may go to another folder
            self._out, self._folder = trainer.out, os.path.abspath(trainer.out)

    @property
    def _names(self) -> Names:
        prefix, suffix = self._filename.split('{')[0], self._filename.split('}')[-1]
        return Names(self._folder, lambda number, rank: (
            f'commit-{prefix}{number}{suffix}' if rank is None
            else f'{prefix}{number}{suffix}.{rank}'))

    def _settle(self, iteration: int | None) -> None:
        """Waits until the last snapshot is on the disk, or raises on all ranks."""
        if self._is_settled:
            if iteration is None:
                self._saver.conclude()
            else:
                self._saver.settle(iteration)
        elif failure := self._saver.failure():
            # No agreement where all is well: a trigger may fire on the writing rank only, such as
            # one that looks at the time, and a rank may come to its end earlier, as in join().
            _background.refuse('a snapshot', self.comm, failure)

    def _warn_of_failure(self) -> None:
        if failure := self._saver.failure():
            warnings.warn(f'the last snapshot was not saved: {failure}', RuntimeWarning,
                          stacklevel=3)

    def _taken(self, trainer: Any, snapshot: Any) -> Save | None:
        """Calls Chainer's snapshot, and returns what our writer got."""
        snapshot(trainer)
        if self._writer is None or self._writer.taken is None:
            return None
        (name, arrays), self._writer.taken = self._writer.taken, None
        path = os.path.join(self._folder, name)
        target = trainer if self.snapshot._target is None else self.snapshot._target
        return Save(
            trainer.updater.iteration, _commit_path(path.removesuffix(f'.{self.master}')), path,
            arrays, _snapshot_files.buffers_of(target, arrays), self._writer.compress,
            then=self._writer._post_save)

    def _find_stale(self, save: Save) -> list[str]:
        """Names, without the rank, of what ``n_retains`` gives up."""
        name = self.snapshot.filename
        if self.snapshot.n_retains <= 0 or callable(name):
            return []
        return [found.removesuffix(f'.{self.master}') for found in
                chainer_snapshot._find_stale_snapshots(name, self._folder, self.snapshot.n_retains)]

    def _path_of(self, name: str, rank: int | None) -> str:
        path = os.path.join(self._folder, name)
        return _commit_path(path) if rank is None else f'{path}.{rank}'

    def _load(self, trainer: Any) -> None:
        _background.wait_for_all()  # an earlier trainer of this process may have saved it
        choice = choose(self.comm, self._names, self._writers)
        if choice is None:
            return
        target = trainer if self.snapshot._target is None else self.snapshot._target
        group = self.comm.split(self.master, self.comm.rank)
        _loading.load(self.comm, choice, target, self._allow_pickle, group)
        self.comm.barrier()
        group.finalize()


class _Writer(snapshot_writers.Writer):
    """In place of Chainer's default writer: copies what it gets, for a thread to write.

    Args:
        writer: What it stands for.
        wait: Waits for that thread.
        allow_pickle: Whether arrays of Python objects are taken.
    """

    def __init__(self, writer: Any, wait: Any, allow_pickle: bool) -> None:
        self._wait = wait
        super().__init__()
        self._post_save_hooks += writer._post_save_hooks
        self._allow_pickle = allow_pickle
        self.compress = writer._kwds.get('compression', True)
        self.taken: tuple[str, dict[str, Any]] | None = None

    @staticmethod
    def can_replace(writer: Any) -> bool:
        return (type(writer) is snapshot_writers.SimpleWriter
                and writer._savefun is chainer.serializers.save_npz
                and set(writer._kwds) <= {'compression'})

    def __call__(self, filename: str, outdir: str, target: Mapping[str, Any]) -> None:
        if not self._allow_pickle:
            _snapshot_files.check_objects(target)
        self.taken = (filename, {key: _snapshot_files.copy_array(array)
                                 for key, array in target.items()})

    def _add_cleanup_hook(self, hook_fun: Any) -> None:
        """Not Chainer's way to do what ``n_retains`` says: commit files go first."""

    def finalize(self) -> None:
        self._wait()


def _parse_replica_sets(replica_sets: Iterable[int | Iterable[int]], size: int
                        ) -> list[set[int]]:
    """Returns disjoint sets that hold every rank once."""
    try:
        sets = [{*map(operator.index, ranks if isinstance(ranks, Iterable) else [ranks])}
                for ranks in replica_sets]
    except TypeError as error:
        raise TypeError('replica_sets has to be a list of ranks and of iterables of ranks, such as '
                        f'[[0, 1], 2], not {replica_sets!r}: {error}') from error
    sets = [ranks for ranks in sets if ranks]
    named = [rank for ranks in sets for rank in ranks]
    for rank in named:
        if not 0 <= rank < size:
            raise AssertionError(
                f'replica_sets names rank {rank}; there are ranks 0 to {size - 1}')
    if len(set(named)) != len(named):
        raise AssertionError(f'a rank can be in one replica set only, but replica_sets is {sets}')
    rest = set(range(size)) - set(named)
    return [*sets, rest] if rest else sets


def _check_equal(everyone: list[list[list[int]]]) -> None:
    """Raises if the ranks have different replica sets; the same error on all ranks."""
    if any(sets != everyone[0] for sets in everyone):
        raise ValueError('replica_sets has to be the same on all ranks, but is\n  ' + '\n  '.join(
            f'rank {rank}: {sets}' for rank, sets in enumerate(everyone)))


def _commit_path(path: str) -> str:
    # Not after the name, where those who look for snapshots by their beginning would find it.
    folder, name = os.path.split(path)
    return os.path.join(folder, f'commit-{name}')


def _with_rank(filename: Any, rank: int) -> Any:
    if callable(filename):
        return lambda trainer: f'{filename(trainer)}.{rank}'
    return f'{filename}.{rank}'
