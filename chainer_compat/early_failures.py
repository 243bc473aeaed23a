"""Ends a job of ``chainermn run`` if a rank fails before ``import chainermn``.

MPICH's mpiexec ignores a rank that exits before MPI_Init, where the other ranks wait for it. After
``import chainermn``, ``chainermn.global_except_hook`` aborts the job. Before, a function does that
Python calls at exit. It changes nothing in other programs.
"""

import atexit
import os
import sys


def listen(folder: str, finder: object) -> None:
    """Abort the job if an uncaught exception ends this process before ``import chainermn``.

    Args:
        folder: The folder that contains ChainerMN.
        finder: The finder of Chainer's modules.
    """
    atexit.unregister(_abort_job)  # there may be an earlier call
    atexit.register(_abort_job, folder, finder, os.getpid())


def _abort_job(folder: str, finder: object, process: int) -> None:
    # The interpreter sets last_value when an exception is uncaught, including a SyntaxError of the
    # script, but not for SystemExit.
    error = getattr(sys, 'last_value', None)
    if (not isinstance(error, Exception) or 'chainermn' in sys.modules
            or os.getpid() != process):  # a forked child is not a rank
        return
    import importlib
    import types

    # Import no part of Chainer, which may be what failed: neither the __init__ of the package, nor
    # the finder, which checks environment variables.
    package = sys.modules['chainermn'] = types.ModuleType('chainermn')
    package.__path__ = [os.path.join(folder, 'chainermn')]
    sys.meta_path[:] = [each for each in sys.meta_path if each is not finder]
    importlib.import_module('chainermn.global_except_hook').abort_before_import(error)
