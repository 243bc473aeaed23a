"""The checkpointer: every rank saves itself, and all resume at the newest common iteration."""
from __future__ import annotations

import os
import re
import sys
import time
import warnings
from collections.abc import Iterable
from typing import Any

import chainer
import numpy as np

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions import _random_state, _snapshot_files
from chainermn.extensions._background import Background, agree, wait_for_all


def create_multi_node_checkpointer(name: str, comm: CommunicatorBase, cp_interval: int = 5,
                                   gc_interval: int = 5, path: str | None = None) -> Any:
    """Makes an extension that lets a job that was interrupted go on where it was.

    Each rank writes its own files ``<path>/<name>.<rank>.<iteration>``.  A file is there only if it
    is whole.  After training ended well on all ranks they are removed; after an error they stay.

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

    Args:
        name: Name of the run.
        comm: ChainerMN communicator.
        cp_interval: Number of newest checkpoints that are always kept.
        gc_interval: After every so many checkpoints the others are removed.
        path: Folder of the files; the trainer's ``out`` by default.

    Returns:
        The extension.
    """
    warnings.warn('The checkpointer is deprecated; use '
                  'chainermn.extensions.multi_node_snapshot instead.',
                  DeprecationWarning, stacklevel=2)
    if '/' in name or cp_interval < 1 or gc_interval < 1:
        comm.refuse('create_multi_node_checkpointer', ValueError(
            f'name has to be without a slash, and both intervals 1 or more; got {name!r}, '
            f'cp_interval={cp_interval}, gc_interval={gc_interval}'))
    return _MultiNodeCheckpointer(name, comm, cp_interval, gc_interval, path)


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
    """See :func:`create_multi_node_checkpointer`."""

    def __init__(self, name: str, comm: Any, cp_interval: int, gc_interval: int, path: str | None
                 ) -> None:
        self.name = name
        self.cp_interval = cp_interval
        self.gc_interval = gc_interval
        self.comm = comm
        self.path = path
        self.stats = _CheckpointStats()
        self._background = Background()
        self._iteration = 0  # what is in flight
        self._saved = 0
        self._failed = False

    def __call__(self, trainer: Any) -> None:
        """Saves the trainer."""
        self._set_path(None, trainer)
        self.save(trainer, trainer.updater.iteration, wait=False)

    def save(self, target: Any, iteration: int, wait: bool = True) -> None:
        """Saves an object.  Collective: every rank calls it.

        Args:
            target: Anything that Chainer can serialize, such as a trainer or a model.
            iteration: Number of the checkpoint.
            wait: Whether to return only when it is on the disk on all ranks.  With False it
                returns when the state is copied in memory, and a thread writes it.

        Raises:
            OSError: On every rank, if any rank could not write this checkpoint, or the one before
                it that was saved with ``wait=False``.  The next call saves again.
        """
        self._set_path(None, target)
        file = self._file(iteration)
        outdated = self._settle()
        start = time.perf_counter()
        arrays = {**_snapshot_files.copy_state(target), **_random_state.capture()}

        def write() -> None:
            self._remove(outdated)
            os.makedirs(os.path.dirname(file), exist_ok=True)
            _snapshot_files.write(file, arrays)
            self.stats.durations.append(time.perf_counter() - start)

        self._iteration = iteration
        self._background.start(file, write)
        if wait:
            self._remove(self._settle())

    def _settle(self) -> list[str]:
        """Waits until what is in flight is whole on all ranks, or raises on all of them.

        Returns:
            Files of this rank that may be removed now.
        """
        if not self._background.is_busy:
            return []
        agree(f'checkpoint {self.name!r} of iteration {self._iteration}', self.comm,
              self._background.join())
        self._saved += 1
        if self._saved % self.gc_interval:
            return []
        # Other ranks may lack a later one, which an earlier run has left here.
        files = self._files()
        past = sorted(iteration for iteration in files if iteration <= self._iteration)
        return [files[iteration] for iteration in past[:-self.cp_interval]]

    def maybe_load(self, trainer: Any, optimizer: Any = None, path: str | None = None) -> None:
        """Loads the newest checkpoint that all ranks have, if there is one.

        Collective: every rank calls it, after everything that has a state was set to the trainer.

        Args:
            trainer: What to load into, an object of the kind that was saved.
            optimizer: Multi-node optimizer.  With it the first update after loading is an ordinary
                one; without it, it only copies rank 0's parameters to all ranks.
            path: Folder of the files, from now on.
        """
        self._remove(self._settle())
        wait_for_all()  # another checkpointer of this process may have saved it
        self._set_path(path, trainer)
        files = self._files()
        iteration = _snapshot_files.newest_common(self.comm, files)
        if iteration is None:
            return
        with np.load(files[iteration], allow_pickle=True) as arrays:
            chainer.serializers.NpzDeserializer(arrays).load(trainer)
            _random_state.restore(arrays)
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
            if failure := self._background.join():
                warnings.warn(f'the last checkpoint was not saved: {failure}', RuntimeWarning,
                              stacklevel=2)
            return
        self._settle()
        if self.path is not None:
            self.comm.barrier()
            self._remove(self._files().values())

    def _set_path(self, path: str | None, target: Any) -> None:
        if path is not None:
            self.path = path
        elif self.path is None:
            self.path = getattr(target, 'out', None)

    @property
    def _folder(self) -> str:
        if self.path is None:
            raise TypeError('pass path= to the checkpointer, as there is no trainer with a folder')
        return self.path

    def _file(self, iteration: int) -> str:
        # Absolute, for the thread: the process may go to another folder.
        return os.path.abspath(
            os.path.join(self._folder, f'{self.name}.{self.comm.rank}.{iteration}'))

    def _files(self) -> dict[int, str]:
        """This rank's files by iteration."""
        pattern = re.compile(re.escape(f'{self.name}.{self.comm.rank}.') + r'(\d+)')
        names = os.listdir(self._folder) if os.path.isdir(self._folder) else []
        iterations = [int(match[1]) for match in map(pattern.fullmatch, names) if match]
        return {iteration: self._file(iteration) for iteration in iterations}

    def _remove(self, files: Iterable[str]) -> None:
        for file in files:
            os.remove(file)
