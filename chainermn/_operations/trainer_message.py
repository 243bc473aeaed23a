"""Print an error in Chainer's Trainer once, although the Trainer and the job both print errors.

The Trainer prints an error before it finalizes the extensions, which can take long or hang, so the
report of the job leaves out the traceback.  The Trainer does not print errors that all ranks raise,
or that another rank of the node has printed.
"""
from __future__ import annotations

import functools
import sys
import traceback

from chainer.training import Trainer

from chainermn._operations import common_error
from chainermn._process import launcher


class _ShowsError:
    """Whether the Trainer prints the error that it has just caught."""

    def __bool__(self) -> bool:
        error = sys.exc_info()[1]
        if not isinstance(error, Exception) or common_error.is_common(error):
            return False
        text = ''.join(traceback.format_exception(error))
        is_first = launcher.claim(text)
        if is_first:
            common_error.mark_shown(error)
        else:
            common_error.mark(error, is_printed_here=False)
        return is_first


def print_errors_once() -> None:
    """Change ``Trainer.run``."""
    run = Trainer.run

    @functools.wraps(run)
    def run_trainer(self: Trainer, show_loop_exception_msg: bool = True) -> None:
        # The Trainer tests this argument when it has caught an error.
        run(self, show_loop_exception_msg and _ShowsError())

    Trainer.run = run_trainer
