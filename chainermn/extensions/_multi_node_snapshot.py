"""Snapshots of several ranks: one file for each set of replicas."""
from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from typing import Any

import chainer
import numpy as np

from chainermn.extensions import _snapshot_files


def multi_node_snapshot(comm: Any, snapshot: Any, replica_sets: Sequence[Iterable[int]]) -> Any:
    """Makes a snapshot extension write one file for each set of ranks that hold the same state.

    The rank with the lowest number in a set writes ``<file name>.<rank>``.  With ``autoload`` all
    sets resume at the newest snapshot that every set has whole; the writing rank reads it and sends
    it to the other ranks of its set, so the folder need not be shared between nodes.

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
        """Takes a snapshot, on the ranks that write."""
        if self._is_writer:
            self.snapshot(trainer)

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        if self._is_writer:
            self.snapshot.on_error(trainer, exc, tb)

    def finalize(self) -> None:
        if self._is_writer:
            self.snapshot.finalize()

    def _load(self, trainer: Any) -> None:
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
