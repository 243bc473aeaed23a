"""Removal of stale snapshots by a process other than the one that takes them."""

import dataclasses
import os


@dataclasses.dataclass
class Removal:
    """A picklable function without arguments that removes all but the newest snapshots."""

    filename: str
    outdir: str
    n_retains: int

    def __call__(self) -> None:
        """Remove the files."""
        from chainer.training.extensions import _snapshot

        for name in _snapshot._find_stale_snapshots(self.filename, self.outdir, self.n_retains):
            os.remove(os.path.join(self.outdir, name))
