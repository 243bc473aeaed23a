"""TensorBoardWriter: rank 0 writes means over all ranks for TensorBoard."""
from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import chainer
from chainer.training import extensions

from chainermn._operations.on_all_ranks import raise_on_all_ranks, raise_together
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions.multi_node_report import create_multi_node_report
from chainermn.extensions.observation_aggregator import Trigger

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter


class TensorBoardWriter(extensions.LogReport):
    """Writes means of the observations of all ranks for TensorBoard.

    As in ``LogReport`` with :func:`create_multi_node_report`, each value is the mean over all ranks
    and all iterations since the last value. Rank 0 writes the files. The extension requires
    tensorboardX: ``pip install tensorboardX``.

    Add the extension on all ranks, then run ``tensorboard --logdir result``.

    Collective whenever the trigger fires, which must happen in the same iterations on all ranks. A
    resumed run continues the curves: TensorBoard shows the values of earlier runs in the same
    folder only up to the iteration from which the run resumed.

    Args:
        comm: ChainerMN communicator.
        log_dir: Folder of the files; ``tensorboard`` in the trainer's ``out`` by default.
        keys: Keys of the observations to write; all of them by default.
        trigger: Trigger that determines when values are written.

    Raises:
        ImportError: On every rank, if rank 0 does not have tensorboardX.

    Example:
        >>> trainer.extend(chainermn.extensions.TensorBoardWriter(comm))
        >>> trainer.run()  # writes to result/tensorboard
    """

    default_name = 'TensorBoardWriter'

    def __init__(self, comm: CommunicatorBase, log_dir: str | None = None, *,
                 keys: Iterable[str] | None = None, trigger: Trigger = (1, 'epoch')) -> None:
        comm = as_communicator(comm, 'TensorBoardWriter(comm)')
        super().__init__(None if keys is None else list(keys), trigger, self._write)
        create_multi_node_report(self, comm)
        self._log_name = None  # LogReport writes no file
        self._comm = comm
        self._log_dir = log_dir
        self._file: EventsWriter | None = None
        with raise_on_all_ranks(comm, 'TensorBoardWriter'):
            if comm.rank == 0:
                _check_installed()

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Open the file on rank 0."""
        with raise_together(self._comm, 'TensorBoardWriter'):
            if self._comm.rank == 0:
                self._file = _open(self._log_dir or os.path.join(trainer.out, 'tensorboard'),
                                   trainer.updater.iteration)

    def finalize(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, means: dict[str, float]) -> None:
        """Write one point of each curve to the file immediately: a checkpoint may follow."""
        if self._file is None:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        for key, value in means.items():
            if key != 'iteration':
                self._file.write_event(Event(
                    summary=scalar(key, value), step=means['iteration'], wall_time=time.time()))
        self._file.flush()


def _open(folder: str, iteration: int) -> EventsWriter:
    """Open a file that hides values of earlier runs after this iteration.

    SummaryWriter is not suitable: it writes points later, in a thread, and its ``flush`` does not
    wait for the thread.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import directory_check

    directory_check(folder)
    # Add the iteration to the file name, because the time in it is only in seconds.
    file = EventsWriter(os.path.join(folder, 'events'), f'.{iteration}')
    start = SessionLog(status=SessionLog.START)
    file.write_event(Event(step=iteration + 1, session_log=start, wall_time=time.time()))
    file.flush()
    return file


def _check_installed() -> None:
    try:
        import tensorboardX  # noqa: F401
    except ImportError as error:
        raise ImportError(f'TensorBoardWriter needs tensorboardX ({error}). '
                          'Install it on rank 0 with "pip install tensorboardX".') from error
