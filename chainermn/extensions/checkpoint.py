"""The checkpointer: every rank saves itself, and all resume at the newest common iteration."""
from __future__ import annotations

import os
import re
import sys
import time
import warnings
from typing import Any

import chainer
import numpy as np

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions import _random_state, _snapshot_files


def create_multi_node_checkpointer(name: str, comm: CommunicatorBase, cp_interval: int = 5,
                                   gc_interval: int = 5, path: str | None = None) -> Any:
    """Makes an extension that lets a job that was interrupted go on where it was.

    Each rank writes its own files ``<path>/<name>.<rank>.<iteration>``.  A file is there only if it
    is whole.  After training ended well on all ranks they are removed; after an error they stay.

    >>> checkpointer = create_multi_node_checkpointer('run 1', comm)          # doctest: +SKIP
    >>> trainer.extend(checkpointer, trigger=(1000, 'iteration'))             # doctest: +SKIP
    >>> checkpointer.maybe_load(trainer, optimizer)                           # doctest: +SKIP
    >>> trainer.run()                                                         # doctest: +SKIP

    Without a Trainer, call ``checkpointer.maybe_load(model)`` and
    ``checkpointer.save(model, iteration)``.

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
        self._saved = 0
        self._failed = False

    def __call__(self, trainer: Any) -> None:
        """Saves the trainer."""
        self._set_path(None, trainer)
        self.save(trainer, trainer.updater.iteration)

    def save(self, target: Any, iteration: int) -> None:
        """Saves an object.  Collective: every rank calls it.

        Args:
            target: Anything that Chainer can serialize, such as a trainer or a model.
            iteration: Number of the checkpoint.

        Raises:
            OSError: On every rank, if any rank could not write.
        """
        self._set_path(None, target)
        start = time.perf_counter()
        failure = None
        try:
            os.makedirs(self._folder, exist_ok=True)
            serializer = chainer.serializers.DictionarySerializer()
            serializer.save(target)
            _snapshot_files.write(self._file(iteration),
                                  {**serializer.target, **_random_state.capture()})
        except OSError as error:
            failure = f'rank {self.comm.rank}: {error}'
        failures = [text for text in self.comm.allgather_obj(failure) if text is not None]
        if failures:
            raise OSError(f'checkpoint {self.name!r} of iteration {iteration} was not saved; the '
                          'ones before it stay\n  ' + '\n  '.join(failures))
        self.stats.durations.append(time.perf_counter() - start)
        self._saved += 1
        if self._saved % self.gc_interval == 0:
            self._remove(sorted(self._files())[:-self.cp_interval])

    def maybe_load(self, trainer: Any, optimizer: Any = None, path: str | None = None) -> None:
        """Loads the newest checkpoint that all ranks have, if there is one.

        Collective: every rank calls it, after everything that has a state was set to the trainer.

        Args:
            trainer: What to load into, an object of the kind that was saved.
            optimizer: Multi-node optimizer.  With it the first update after loading is an ordinary
                one; without it, it only copies rank 0's parameters to all ranks.
            path: Folder of the files, from now on.
        """
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
        """Removes the files, if training ended well on all ranks."""
        # Trainer.run calls this in a "finally" clause, and on_error not for KeyboardInterrupt.
        if self._failed or sys.exc_info()[0] is not None or self.path is None:
            return
        self.comm.barrier()
        self._remove(self._files())

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
        return os.path.join(self._folder, f'{self.name}.{self.comm.rank}.{iteration}')

    def _files(self) -> dict[int, str]:
        """This rank's files by iteration."""
        pattern = re.compile(re.escape(f'{self.name}.{self.comm.rank}.') + r'(\d+)')
        names = os.listdir(self._folder) if os.path.isdir(self._folder) else []
        iterations = [int(match[1]) for match in map(pattern.fullmatch, names) if match]
        return {iteration: self._file(iteration) for iteration in iterations}

    def _remove(self, iterations: Any) -> None:
        for iteration in iterations:
            os.remove(self._file(iteration))
