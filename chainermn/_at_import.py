"""Changes of the environment, Python and Chainer by ``import chainermn``.

A script works as with ChainerMN 7 without calling anything, so this has to happen at import.
"""
from __future__ import annotations

from chainermn import global_except_hook
from chainermn._process import environment, forked
from chainermn._timeline import data_loading
from chainermn.extensions import _trainer_changes


def apply() -> None:
    """Make all changes."""
    environment.set_mpi_defaults()
    # Forked children: they are not ranks, so they exit without MPI_Finalize.
    forked.skip_mpi_finalize_in_children()
    # sys.excepthook and SystemExit: a rank that fails aborts the job.
    global_except_hook._add_hook_if_enabled()
    # Trainer: errors are printed once, and two mistakes are reported.
    _trainer_changes.change_trainer()
    # next() of Chainer's iterators: the time that loading a batch takes is on the timeline.
    data_loading.record()
