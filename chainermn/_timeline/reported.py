"""The reports of this process's Trainer: the newest entries of its LogReports.

``top`` and the metrics read them from another thread, on request.
"""
from __future__ import annotations

import contextlib
import weakref

import chainer

from chainermn._process import runtime

_MAX_VALUES, _MAX_LENGTH = 64, 100  # limits for scripts that report very many values


class _Followed(runtime.ProcessState):
    def __init__(self) -> None:
        self.trainer: weakref.ref[chainer.training.Trainer] | None = None


def follow(trainer: chainer.training.Trainer) -> None:
    """Read the reports of a Trainer from now on, as long as the Trainer exists."""
    runtime.get(_Followed).trainer = weakref.ref(trainer)


def newest() -> dict[str, float]:
    """Return the numbers of the newest entry of each LogReport, by name."""
    found: dict[str, float] = {}
    followed = runtime.get(_Followed).trainer
    trainer = None if followed is None else followed()
    with contextlib.suppress(Exception):  # the main thread may change them at the same time
        for entry in [*trainer._extensions.values()] if trainer is not None else ():
            if isinstance(entry.extension, chainer.training.extensions.LogReport):
                for values in entry.extension.log[-1:]:
                    found.update({name: float(value) for name, value in [*values.items()]
                                  if isinstance(value, (int, float)) and len(name) < _MAX_LENGTH})
    return dict([*found.items()][:_MAX_VALUES])
