"""TensorBoardWriter: rank 0 writes means over all ranks for TensorBoard."""
from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import chainer
from chainer.training import extensions

from chainermn._errors import raise_on_all_ranks
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions.multi_node_report import create_multi_node_report
from chainermn.extensions.observation_aggregator import Trigger

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter


class TensorBoardWriter(extensions.LogReport):
    """Writes means of the observations of all ranks for TensorBoard.

    Like ``LogReport`` with :func:`create_multi_node_report`: each value is the mean over all ranks
    and all iterations since the last one.  Rank 0 writes.  It requires tensorboardX::

        pip install 'chainermn[tensorboard]'

    Add it on all ranks, then run ``tensorboard --logdir result``::

        trainer.extend(chainermn.extensions.TensorBoardWriter(comm))

    Collective whenever the trigger fires, which must be in the same iteration on all ranks.  A
    resumed run continues the curves: of earlier runs in the same folder, TensorBoard only shows
    values up to the iteration that it resumed from.

    Args:
        comm: ChainerMN communicator.
        log_dir: Folder of the files; ``tensorboard`` in the trainer's ``out`` by default.
        keys: Keys of the observations to write; all of them by default.
        trigger: When to write.

    Raises:
        ImportError: On every rank, if rank 0 does not have tensorboardX.
    """

    default_name = 'TensorBoardWriter'

    def __init__(self, comm: CommunicatorBase, log_dir: str | None = None, *,
                 keys: Iterable[str] | None = None, trigger: Trigger = (1, 'epoch')) -> None:
        super().__init__(None if keys is None else list(keys), trigger, self._write)
        create_multi_node_report(self, comm)
        self._log_name = None  # LogReport writes no file
        self._comm = comm
        self._log_dir = log_dir
        self._writer: SummaryWriter | None = None
        with raise_on_all_ranks(comm, 'TensorBoardWriter'):
            if comm.rank == 0:
                _import_writer()

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Opens the file on rank 0."""
        with raise_on_all_ranks(self._comm, 'TensorBoardWriter'):
            if self._comm.rank == 0:
                iteration = trainer.updater.iteration
                self._writer = _import_writer()(
                    self._log_dir or os.path.join(trainer.out, 'tensorboard'),
                    purge_step=iteration + 1,
                    filename_suffix=f'.{iteration}')  # the name only has the time in seconds

    def finalize(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, means: dict[str, float]) -> None:
        if self._writer is not None:
            for key, value in means.items():
                if key != 'iteration':
                    self._writer.add_scalar(key, value, means['iteration'])
            self._writer.flush()


def _import_writer() -> type[SummaryWriter]:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError(f'TensorBoardWriter needs tensorboardX ({error}). '
                          "Install it on rank 0: pip install 'chainermn[tensorboard]'") from error
    return SummaryWriter
