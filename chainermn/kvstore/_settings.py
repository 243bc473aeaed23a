"""What the servers of a store are told: what to do with what is pushed, and what to remember."""
from __future__ import annotations

import abc
import os
from typing import Any, NoReturn

from chainermn.communicators import compression
from chainermn.kvstore import _optimizer_states, _updaters
from chainermn.kvstore._layout import Key, Layout
from chainermn.kvstore._server import Server, Updater

#: An array with this many elements or more is cut into parts, one for each server.
BIGARRAY_BOUND = 1_000_000


class Settings(metaclass=abc.ABCMeta):
    """The part of a store that has to do with its servers."""

    def __init__(self, type: str, rank: int, num_workers: int, bigarray_bound: float) -> None:
        self._type = type
        self._rank = rank
        self._num_workers = num_workers
        self._bound = bigarray_bound
        self._server = Server(rank)
        self._layouts: dict[Key, Layout] = {}
        self._compressor: Any = None

    def set_updater(self, updater: Updater) -> None:
        """Sets what is done with what is pushed; without it, it is assigned.

        In the ``dist`` types every rank calls it with the same function, which runs on the rank
        that has the key, and for a large array on each rank with its part.

        Args:
            updater: Called as ``updater(key, input, stored)``; changes the array ``stored`` in
                place.  ``input`` is a new array.  It must not use the store itself.
        """
        if not callable(updater):
            self._refuse('set_updater', TypeError(f'the updater is no function: {updater!r}'))
        self._agree('set_updater', '')
        self._server.set_updater(updater)
        self.barrier()

    _set_updater = set_updater

    def set_optimizer(self, optimizer: Any, rescale_grad: float = 1.) -> None:
        """Makes the servers step a Chainer optimizer, with what is pushed as the gradient.

        In the ``dist`` types every rank calls it with an optimizer of the same class and
        hyperparameters.  Each server reads them from its own at each step, so a change counts if
        every rank makes it.  What an earlier optimizer remembered is forgotten.

        Args:
            optimizer: ``chainer.optimizer.GradientMethod``, set up with a model (which is not
                touched) or not.  Of its hooks only those that are called for each parameter, such
                as ``WeightDecay``, can be used.
            rescale_grad: Number by which gradients are multiplied, such as
                ``1 / kvstore.num_workers`` for ``dist_sync``, which sums them.

        Raises:
            TypeError: If it is no such optimizer.
            ValueError: If it cannot update parts of arrays, and there are some already.
        """
        try:
            updater = _updaters.OptimizerUpdater(optimizer, rescale_grad)
            cut = [layout for layout in self._layouts.values() if layout.is_cut]
            if cut and not updater.is_elementwise:
                raise ValueError(
                    'this optimizer, or one of its hooks, cannot update an array in parts, but the '
                    f'servers have parts of {", ".join(map(str, cut))}; call set_optimizer before '
                    'init, or create the store with a larger bigarray_bound')
            described = repr((_updaters.describe(optimizer), rescale_grad))
        except Exception as error:
            self._refuse('set_optimizer', error)
        self._agree('set_optimizer', described)
        self._server.set_updater(updater)
        self.barrier()

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Compresses what is pushed from now on.

        With type ``'2bit'`` each value travels as ``threshold``, ``-threshold`` or 0, so that 16
        values take the place of one float32.  What is left is kept by the sender and added to its
        next push of the key.  In the ``dist`` types it is between workers and servers; otherwise
        between the devices of a process, where a key is pushed with several values.  Only
        floating-point arrays are compressed, not a :class:`RowSparse`, and never what is pulled.

        Args:
            compression_params: ``{'type': '2bit', 'threshold': 0.5}``; the same on all ranks.

        Raises:
            TypeError, ValueError: If there is no such compression.
        """
        try:
            if not isinstance(compression_params, dict):
                raise TypeError('compression_params has to be a dict such as '
                                f"{{'type': '2bit', 'threshold': 0.5}}, not {compression_params!r}")
            if compression_params.get('type') != '2bit':
                raise ValueError("the compression of a store has to be of type '2bit', not "
                                 f'{compression_params.get("type")!r}')
            compressor = compression.get(compression_params)
        except Exception as error:
            self._refuse('set_gradient_compression', error)
        self._agree('set_gradient_compression', repr(compressor))
        self._compressor = self._server.compressor = compressor
        self.barrier()

    def save_optimizer_states(self, fname: str | os.PathLike[str],
                              dump_optimizer: bool = False) -> None:
        """Writes what the optimizer remembers, such as momenta, to an npz file.

        In the ``dist`` types every rank calls it, and rank 0 writes one file for all, whatever
        their number.  The values of the keys are not in it: pull and save these.  The file is
        whole whenever it is there.

        Args:
            fname: Path of the file.
            dump_optimizer: If true, the class and the hyperparameters are written as well.

        Raises:
            RuntimeError: If there is no optimizer.
            OSError: If rank 0 cannot write the file.
        """
        try:
            optimizer = self._optimizer('save')
        except Exception as error:
            self._refuse('save_optimizer_states', error)
        parts = self._gather(self._server.states())
        if parts is not None:
            try:
                states = {}
                for layout in self._layouts.values():
                    its = {server: found[layout.number] for server, found in enumerate(parts)
                           if layout.number in found}
                    if its:
                        states[layout.key] = _optimizer_states.whole(layout, its)
                _optimizer_states.write(
                    fname, states, _updaters.describe(optimizer) if dump_optimizer else None)
            except Exception as error:
                self._refuse('save_optimizer_states', error)
        self.barrier()

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Reads what :meth:`save_optimizer_states` wrote.  No code in the file is run.

        In the ``dist`` types every rank calls it, and rank 0 reads the file; the number of ranks
        may be another one than when it was written.  Keys that are initialized later get their
        states then.  If the file has hyperparameters, they become those of the optimizer.

        Args:
            fname: Path of the file.

        Raises:
            RuntimeError: If there is no optimizer.
            ValueError: If the file is damaged, is something else, or does not fit to the optimizer.
            OSError: If rank 0 cannot read the file.
        """
        found = None
        try:
            optimizer = self._optimizer('load')
            if self._rank == 0:
                found = _optimizer_states.read(fname)
        except Exception as error:
            self._refuse('load_optimizer_states', error)
        states, about = self._from_rank_0(found)
        if about is not None:
            if about['optimizer'] != (ours := _updaters.describe(optimizer)['optimizer']):
                raise ValueError(f'{os.fspath(fname)} has the states of {about["optimizer"]}, but '
                                 f'the optimizer is {ours}')
            for name, value in about['hyperparameters'].items():
                setattr(optimizer.hyperparam, name, value)
        self._server.restore(states)
        self.barrier()

    def _optimizer(self, what: str) -> Any:
        if not isinstance(self._server.updater, _updaters.OptimizerUpdater):
            raise RuntimeError(f'there are no optimizer states to {what}: call set_optimizer first')
        return self._server.updater.optimizer

    def _may_cut(self) -> bool:
        updater = self._server.updater
        return not isinstance(updater, _updaters.OptimizerUpdater) or updater.is_elementwise

    # --- how the types differ ----------------------------------------------------------------

    @abc.abstractmethod
    def barrier(self) -> None:
        """Returns once every worker has called it."""

    def _barrier(self) -> None:
        self.barrier()

    @abc.abstractmethod
    def _refuse(self, verb: str, error: Exception) -> NoReturn:
        """Raises the error, on every rank if all of them call the verb."""

    @abc.abstractmethod
    def _agree(self, verb: str, said: str) -> None:
        """Raises on all ranks if they do not say the same."""

    @abc.abstractmethod
    def _gather(self, obj: Any) -> list[Any] | None:
        """The objects of all ranks on rank 0; None elsewhere."""

    @abc.abstractmethod
    def _from_rank_0(self, obj: Any) -> Any:
        """The object of rank 0."""
