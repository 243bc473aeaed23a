"""Ranks whose LogReport writes the same file are warned, since each overwrites the others' log."""
from __future__ import annotations

import functools
import os
import warnings

from chainer.training import Trainer
from chainer.training.extensions import LogReport

from chainermn._system import launcher


def warn_about_shared_logs() -> None:
    """Change ``LogReport.initialize``, which the Trainer calls before the first update."""
    initialize = LogReport.initialize

    @functools.wraps(initialize)
    def checked_initialize(self: LogReport, trainer: Trainer) -> None:
        initialize(self, trainer)
        if self._log_name is None:  # it writes no file
            return
        path = os.path.abspath(os.path.join(trainer.out, self._log_name))
        if not launcher.claim(f'log {path}') and launcher.claim(f'warning about log {path}'):
            warnings.warn(
                f'LogReport writes {path} on several ranks, which overwrite each other. Pass '
                'chainermn.extensions.create_multi_node_report(LogReport(), comm) to '
                'trainer.extend on all ranks: rank 0 then writes means over all ranks.',
                stacklevel=4)

    LogReport.initialize = checked_initialize
