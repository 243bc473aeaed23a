"""How Chainer starts processes: by fork, unless the program chose another start method.

Python 3.14 changed the default from fork to forkserver. A process that forkserver starts imports
the main module and unpickles its arguments. Scripts that were written for fork have no main guard,
pass functions that cannot be pickled, or initialize MPI when they are imported.
"""

import multiprocessing
from multiprocessing import context as contexts
from multiprocessing.process import BaseProcess
from typing import Any

_settings: Any = contexts._default_context
_default: Any = contexts.ForkServerContext()


def is_forkserver_default() -> bool:
    """Return whether Python starts processes by forkserver if the program makes no choice."""
    return multiprocessing.get_all_start_methods()[0] == 'forkserver'


def distinguish_default() -> None:
    """Give the default start method a context of its own, so that a choice can be recognized.

    A program that creates a lock without choosing a start method (as some progress bars do) makes
    multiprocessing settle on the default, as if the program had chosen forkserver. If this
    happened before Chainer was imported, it counts as a choice.
    """
    if _settings._actual_context is None:
        _settings._default_context = _default


def context() -> Any:
    """Return multiprocessing's context for Chainer."""
    chosen = _settings._actual_context not in (None, _default)
    return multiprocessing.get_context(None if chosen else 'fork')


class Process(multiprocessing.Process):
    """A process that starts by :func:`context`, and a base class of such processes."""

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:  # noqa: N802  (Python's name)
        return context().Process._Popen(process)


class _ForChainer:
    """Replaces the module ``multiprocessing`` in Chainer's modules."""

    Process = Process

    def __getattr__(self, name: str) -> Any:
        """Return the attribute ``name`` of :func:`context`."""
        return getattr(context(), name)


for_chainer = _ForChainer()
