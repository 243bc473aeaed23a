"""What ``import chainermn`` changes in the environment, in Python and in Chainer.

A script works as with ChainerMN 7 without calling anything, so this has to happen at import.
"""
from __future__ import annotations

from chainermn import global_except_hook
from chainermn._operations import trainer_message
from chainermn._process import environment, forked
from chainermn._timeline import data_loading
from chainermn.extensions import _shared_outputs
from chainermn.optimizers import _set_up


def apply() -> None:
    """Make all changes."""
    environment.set_mpi_defaults()
    # Forked children: they are no ranks, so they exit without MPI_Finalize.
    forked.skip_mpi_finalize_in_children()
    # sys.excepthook and SystemExit: a rank that fails aborts the job.
    global_except_hook._add_hook_if_enabled()
    # Trainer.run: an error of all ranks is printed once.
    trainer_message.print_errors_once()
    # Trainer.__init__: a multi-node optimizer without a model is an error on all ranks.
    _set_up.check_optimizers_of_trainers()
    # Trainer.run: a warning if several ranks write the same file or screen.
    _shared_outputs.warn_about_shared_outputs()
    # next() of Chainer's iterators: the time that loading a batch takes is on the timeline.
    data_loading.record()
