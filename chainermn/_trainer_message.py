"""Chainer's Trainer does not print errors that all ranks raise: the job prints them once."""
from __future__ import annotations

import functools
import sys

from chainer.training import Trainer

from chainermn import _common_error


class _ShowsError:
    """Whether the Trainer prints the error that it has just caught."""

    def __bool__(self) -> bool:
        return not _common_error.is_common(sys.exc_info()[1])


def print_common_errors_once() -> None:
    """Changes ``Trainer.run``."""
    run = Trainer.run

    @functools.wraps(run)
    def run_trainer(self: Trainer, show_loop_exception_msg: bool = True) -> None:
        # The Trainer tests this argument when it has caught an error.
        run(self, show_loop_exception_msg and _ShowsError())

    Trainer.run = run_trainer
