"""Snapshots of several ranks: one file for each set of replicas."""
from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import chainer
import numpy as np
from chainer.training.extensions import snapshot_writers

from chainermn.extensions import _background, _snapshot_files


def multi_node_snapshot(comm: Any, snapshot: Any, replica_sets: Sequence[Iterable[int]]) -> Any:
    """Makes a snapshot extension write one file for each set of ranks that hold the same state.

    The rank with the lowest number in a set writes ``<file name>.<rank>``.  With ``autoload`` all
    sets resume at the newest snapshot that every set has whole; the writing rank reads it and sends
    it to the other ranks of its set, so the folder need not be shared between nodes.

    Training stops only while the state is copied in memory; a thread writes the copy, in the format
    of ``chainer.serializers.save_npz``, and it is on the disk at the next snapshot and at the end
    of the training.  An error of writing is an OSError there: it is raised on every rank, on those
    that do not write in their next collective verb of ``comm``.  A snapshot with a ``writer`` or a
    ``savefun`` other than Chainer's default (``SimpleWriter``, ``save_npz``) is written by that.

    With several sets all ranks agree at every snapshot, so it has to be triggered in the same
    iterations on all; and the files that ``n_retains`` gives up are removed once all sets have the
    newer one.

    In data-parallel training all ranks are replicas of one another:

    >>> snapshot = extensions.snapshot(n_retains=3, autoload=True)            # doctest: +SKIP
    >>> trainer.extend(multi_node_snapshot(comm, snapshot, []),               # doctest: +SKIP
    ...                trigger=(1000, 'iteration'))

    Args:
        comm: ChainerMN communicator.
        snapshot: What ``chainer.training.extensions.snapshot`` or ``snapshot_object`` returns.
        replica_sets: Sets of ranks with the same state.  Ranks that are in none form another one:
            ``[[0, 1]]`` on four ranks means ``{0, 1}`` and ``{2, 3}``, ``[]`` means one set of all.

    Returns:
        The extension; trigger and priority are those of ``snapshot``.

    Raises:
        AssertionError: If a rank is in two sets, or there is no such rank.
        ValueError: If the file name is a function, with ``autoload``.
    """
    return _MultiNodeSnapshot(comm, snapshot, replica_sets)


class _MultiNodeSnapshot(chainer.training.Extension):
    """See :func:`multi_node_snapshot`."""

    def __init__(self, comm: Any, snapshot: Any, replica_sets: Sequence[Iterable[int]]) -> None:
        self.comm = comm
        self.snapshot = snapshot
        sets = _parse_replica_sets(replica_sets, comm.size)
        self.replica_set = next(ranks for ranks in sets if comm.rank in ranks)
        self._is_alone = len(sets) == 1
        self.master = min(self.replica_set)
        self.trigger = snapshot.trigger
        self.priority = snapshot.priority
        self.name = snapshot.name
        if snapshot.autoload and callable(snapshot.filename):
            comm.refuse('multi_node_snapshot', ValueError(
                'autoload takes a file name such as "snapshot_iter_{.updater.iteration}", not a '
                'function: the iteration of a file has to be read from its name'))
        self._autoload = snapshot.autoload
        snapshot.autoload = False  # we choose the file
        snapshot.filename = _with_rank(snapshot.filename, self.master)
        self._writer: _Writer | None = None
        if _Writer.can_replace(snapshot.writer):
            snapshot.writer = self._writer = _Writer(snapshot.writer, self._is_alone)

    @property
    def default_name(self) -> str:
        return self.snapshot.default_name

    @property
    def _is_writer(self) -> bool:
        return self.comm.rank == self.master

    def initialize(self, trainer: Any) -> None:
        """Resumes, if the snapshot has ``autoload``.  Collective: every rank calls it."""
        if self._autoload:
            self._load(trainer)
        if self._is_writer:
            self.snapshot.initialize(trainer)

    def __call__(self, trainer: Any) -> None:
        """Takes a snapshot, on the ranks that write.  Collective if there are several sets."""
        self._settle()
        if self._is_writer:
            self.snapshot(trainer)

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        self._warn_of_failure()
        if self._is_writer:
            self.snapshot.on_error(trainer, exc, tb)

    def finalize(self) -> None:
        """Waits for the last snapshot.  Collective if there are several sets."""
        if self._is_writer:
            self.snapshot.finalize()
        if sys.exc_info()[0] is None:
            self._settle()
        else:  # Trainer.run calls this in a "finally" clause
            self._warn_of_failure()

    def _settle(self) -> None:
        """Waits until the last snapshot is on the disk, or raises on all ranks."""
        is_new = self._writer is not None and self._writer.background.is_busy
        failure = self._failure()
        if not self._is_alone:
            _background.agree('a snapshot', self.comm, failure)
            if self._writer is not None and is_new:
                self._writer.remove_outdated()
        elif failure is not None:
            # No agreement where all is well: a trigger may fire on the writing rank only, such as
            # one that looks at the time, and a rank may come to its end earlier, as in join().
            _background.refuse('a snapshot', self.comm, failure)

    def _failure(self) -> str | None:
        return None if self._writer is None else self._writer.background.join()

    def _warn_of_failure(self) -> None:
        if failure := self._failure():
            warnings.warn(f'the last snapshot was not saved: {failure}', RuntimeWarning,
                          stacklevel=3)

    def _load(self, trainer: Any) -> None:
        _background.wait_for_all()  # an earlier trainer of this process may have saved it
        files = self._files(trainer.out) if self._is_writer else None
        iteration = _snapshot_files.newest_common(self.comm, files)
        if iteration is None:
            return
        group = self.comm.split(self.master, self.comm.rank)
        content = None
        if files is not None:
            with open(files[iteration], 'rb') as file:
                content = np.frombuffer(file.read(), np.uint8)
        content = group.bcast(content)
        group.finalize()
        target = trainer if self.snapshot._target is None else self.snapshot._target
        with np.load(io.BytesIO(content.tobytes()), allow_pickle=True) as arrays:
            chainer.serializers.NpzDeserializer(arrays).load(target)

    def _files(self, folder: str) -> dict[int, str]:
        """This rank's snapshots by iteration."""
        prefix, suffix = self.snapshot.filename.split('{')[0], self.snapshot.filename.split('}')[-1]
        files = {}
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            number = name[len(prefix):len(name) - len(suffix)]
            if name.startswith(prefix) and name.endswith(suffix) and number.isdecimal():
                files[int(number)] = os.path.join(folder, name)
        return files


class _Writer(snapshot_writers.Writer):
    """In place of Chainer's default writer: the same file, on the disk, written by a thread.

    Args:
        writer: What it stands for.
        is_alone: Whether it is the only rank that writes, so that what ``n_retains`` gives up can
            be removed as soon as the newer file is there.
    """

    def __init__(self, writer: Any, is_alone: bool) -> None:
        self.background = _background.Background()
        super().__init__()
        self._post_save_hooks += writer._post_save_hooks
        self._compress = writer._kwds.get('compression', True)
        self._is_alone = is_alone

    @staticmethod
    def can_replace(writer: Any) -> bool:
        return (type(writer) is snapshot_writers.SimpleWriter
                and writer._savefun is chainer.serializers.save_npz
                and set(writer._kwds) <= {'compression'})

    def __call__(self, filename: str, outdir: str, target: Mapping[str, Any]) -> None:
        path = os.path.abspath(os.path.join(outdir, filename))
        arrays = {key: _snapshot_files.copy_array(array) for key, array in target.items()}

        def write() -> None:
            _snapshot_files.write(path, arrays, self._compress)
            if self._is_alone:
                self.remove_outdated()

        self.background.start(path, write)

    def remove_outdated(self) -> None:
        self._post_save()

    def finalize(self) -> None:
        self.background.wait()


def _parse_replica_sets(replica_sets: Sequence[Iterable[int]], size: int) -> list[set[int]]:
    """Returns disjoint sets that hold every rank once."""
    sets = [set(ranks) for ranks in replica_sets]
    named = [rank for ranks in sets for rank in ranks]
    for rank in named:
        if not 0 <= rank < size:
            raise AssertionError(
                f'replica_sets names rank {rank}; there are ranks 0 to {size - 1}')
    if len(set(named)) != len(named):
        raise AssertionError(f'a rank can be in one replica set only, but replica_sets is {sets}')
    rest = set(range(size)) - set(named)
    return [*sets, rest] if rest else sets


def _with_rank(filename: Any, rank: int) -> Any:
    if callable(filename):
        return lambda trainer: f'{filename(trainer)}.{rank}'
    return f'{filename}.{rank}'
