"""One attempt: run the job once and record the result."""
from __future__ import annotations

import glob
import signal
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping

from chainermn._commands.run import supervisor
from chainermn._commands.run.forwarded_signals import Signals
from chainermn._commands.run.job_report import Attempt
from chainermn._commands.run.pool import Ending
from chainermn._process import environment

_POLL_INTERVAL = 0.05  # seconds
_MAX_LENGTH = 400  # characters of a message in the table


def run_once(command: list[str], env: dict[str, str], signals: Signals, grace: float,
             ranks: Mapping[str, int] | None = None,
             watch: Callable[[], Ending | None] = lambda: None) -> Attempt:
    """Run mpiexec and forward signals to it.

    When this process exits, the job is terminated, even if this process is killed.

    Args:
        command: The mpiexec command.
        env: The environment of mpiexec.
        signals: The signals of this process.
        grace: The number of seconds the job may take to exit after a signal before it is killed.
        ranks: The number of ranks on each host, for the result.
        watch: Function that returns the reason to stop the job with SIGTERM, or ``None``.
    """
    with tempfile.TemporaryDirectory(  # only this user can read it
            prefix='chainermn-run-', ignore_cleanup_errors=True) as folder:
        signals.forget_notices()
        started, start = time.time(), time.monotonic()
        process = supervisor.start(
            command, {**env, environment.RUN_FOLDER: folder}, grace)
        ending, is_ending, is_killed = None, False, False
        while process.poll() is None:
            signals.forward_notices(process)
            if not is_ending and (signals.ending or (ending := watch())):
                is_ending = True
                process.send_signal(signal.SIGINT if signals.ending == signal.SIGINT
                                    else signal.SIGTERM)
            if signals.is_urgent and not is_killed:
                is_killed = True
                process.send_signal(signal.SIGINT)
            time.sleep(_POLL_INTERVAL)
        messages = _messages(folder)
        if signals.ending is not None:
            ending = Ending(f'terminated by {signal.Signals(signals.ending).name}', False)
            messages = [each for each in messages if not supervisor.is_expected(each)]
        return Attempt(started, time.monotonic() - start, supervisor.exit_status(process),
                       messages, ranks or {}, ending)


def _messages(folder: str) -> list[str]:
    """Return the messages of the failed ranks, each as one line."""
    texts = []
    for path in sorted(glob.glob(f'{glob.escape(folder)}/*.txt')):
        with open(path, encoding='utf-8', errors='replace') as file:
            texts.append(textwrap.shorten(file.read(), _MAX_LENGTH, placeholder=' ...'))
    return texts
