"""Replaces the default writer of Chainer's snapshots: copies the state, for a thread to write."""
from __future__ import annotations

from collections.abc import Callable, Mapping

import chainer
import numpy as np
from chainer.training.extensions import snapshot_writers

from chainermn._types import Object
from chainermn.extensions._checkpointing import state
from chainermn.extensions._checkpointing.late_copies import LateCopies


class CopyingWriter(snapshot_writers.Writer):
    """Copies the state in memory; :class:`Saver` writes it.

    Args:
        writer: The default writer.
        wait: Function that waits for the thread.
        allow_pickle: Whether to accept arrays of Python objects.
    """

    def __init__(self, writer: snapshot_writers.SimpleWriter, wait: Callable[[], None],
                 allow_pickle: bool) -> None:
        self._wait = wait
        super().__init__()
        self._post_save_hooks += writer._post_save_hooks
        self._allow_pickle = allow_pickle
        self.compress = writer._kwds.get('compression', True)
        self.taken: tuple[str, dict[str, np.ndarray]] | None = None  # file name, state
        self.late = LateCopies()  # what to copy late

    @staticmethod
    def can_replace(writer: Object) -> bool:
        """Return whether a writer is Chainer's default, with its default format."""
        return (type(writer) is snapshot_writers.SimpleWriter
                and writer._savefun is chainer.serializers.save_npz
                and set(writer._kwds) <= {'compression'})

    def __call__(self, filename: str, outdir: str, target: Mapping[str, np.ndarray]) -> None:
        """Copy a state, for a file of this name."""
        if not self._allow_pickle:
            state.check_objects(target)
        taken = {key: array if array in self.late else state.copy_array(array)
                 for key, array in target.items()}
        self.late.begin(taken, n_references=2)  # also those of the target
        self.taken = (filename, taken)

    def _add_cleanup_hook(self, hook_fun: Callable[..., None]) -> None:
        """Ignore Chainer's hook for ``n_retains``: Saver removes the files."""

    def finalize(self) -> None:
        """Wait for the thread."""
        self._wait()
