"""Changes that ``import chainermn`` makes to the environment, Python and Chainer.

They are made at import because scripts for ChainerMN 7 do not call anything to request them.
"""
from __future__ import annotations

from chainermn import global_except_hook
from chainermn._process import environment, forked
from chainermn._timeline import data_loading
from chainermn.extensions import _trainer_changes


def apply() -> None:
    """Make all changes."""
    environment.set_mpi_defaults()
    # Forked children are not ranks, so they exit without MPI_Finalize.
    forked.skip_mpi_finalize_in_children()
    # sys.excepthook and SystemExit: a rank that fails aborts the job.
    global_except_hook._add_hook_if_enabled()
    # Trainer: each error is printed once; some mistakes raise an error or cause a warning.
    _trainer_changes.change_trainer()
    # next() of Chainer's iterators: the timeline shows how long loading a batch takes.
    data_loading.record()
