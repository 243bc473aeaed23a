"""Changes in Python since Chainer 7.8.1.

Python 3.14 changed the default start method of multiprocessing from fork to forkserver. A process
that forkserver starts imports the main module and unpickles its arguments. Scripts written for fork
may have no main guard, pass functions that cannot be pickled, or initialize MPI on import.
Therefore, Chainer starts processes by fork, unless the script chose a different start method.
"""

import multiprocessing
from multiprocessing import context as contexts
from multiprocessing.process import BaseProcess
from typing import Any

from chainer_compat.patching.registry import edit


@edit('chainer.iterators.multiprocess_iterator')
def set_daemon() -> dict[str, str]:
    """Python >= 3.10 deprecates ``Thread.setDaemon``, used by MultiprocessIterator."""
    return {'thread.setDaemon(True)': 'thread.daemon = True'}


@edit('chainer.iterators.multiprocess_iterator', 'chainer.training.extensions.snapshot_writers',
      'chainer.training.updaters.multiprocess_parallel_updater')
def fork_by_default() -> dict[str, str]:
    """Python >= 3.14 starts processes by forkserver by default, but scripts were written for fork.

    Chainer uses fork unless your script calls ``multiprocessing.set_start_method``.
    """
    if multiprocessing.get_all_start_methods()[0] != 'forkserver':
        return {}
    _distinguish_default()
    return {'import multiprocessing\n':
            'from chainer_compat.fixes.python_changes import for_chainer as multiprocessing\n'}


_settings: Any = contexts._default_context
_default: Any = contexts.ForkServerContext()


def _distinguish_default() -> None:
    """Give the default start method a separate context, so that a choice can be recognized.

    If a lock is created before a start method is chosen (as some progress bars do),
    multiprocessing settles on the default, as if the script had chosen forkserver. If this
    happens before Chainer is imported, it counts as a choice.
    """
    if _settings._actual_context is None:
        _settings._default_context = _default


def context() -> Any:
    """Return the multiprocessing context for Chainer: fork, unless the script chose another."""
    chosen = _settings._actual_context not in (None, _default)
    return multiprocessing.get_context(None if chosen else 'fork')


class Process(multiprocessing.Process):
    """A process with the start method of :func:`context`; Chainer also derives classes from it."""

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
