"""TorchRecord: a RunRecord of training in PyTorch, for example of a module from ``to_torch``."""
from __future__ import annotations

import os
import types
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from chainermn._records.run_record import Recording, check_details

if TYPE_CHECKING:
    import torch


class TorchRecord:
    """Records the inputs and results of each training step in PyTorch.

    ``chainermn compare`` compares the record with other records, such as the record of training in
    Chainer. It compares parameters by name, as ``chainer_compat.to_torch`` names them. If the
    names differ, it compares only batches, losses and norms.

    Args:
        module: The module.
        optimizer: Optimizer of the module.
        folder: Folder to write to.
        details: See :class:`RunRecord`; there are no details of functions.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``details`` is less than 1.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str,
                 details: int = 100) -> None:
        import torch

        for value, name, cls, what in (
                (module, 'module', torch.nn.Module, 'a torch.nn.Module'),
                (optimizer, 'optimizer', torch.optim.Optimizer, 'a torch.optim.Optimizer'),
                (folder, 'folder', (str, os.PathLike), 'a path')):
            if not isinstance(value, cls):
                raise TypeError(f'{name} must be {what}, not {type(value).__module__}.'
                                f'{type(value).__qualname__}')
        check_details(details)
        self._recording = Recording(folder, details)
        self._has_begun = False
        self._training = _Training(module, optimizer)
        optimizer.register_step_pre_hook(lambda *_: self._recording.record_means(self._training))
        optimizer.register_step_post_hook(lambda *_: self._end())

    def begin(self, *batch: torch.Tensor | np.ndarray) -> None:
        """Begin a step.

        Args:
            batch: The batch of this rank, the same as in the run to compare with.
        """
        self._has_begun = True
        self._recording.begin(self._training, None, tuple(
            each if isinstance(each, np.ndarray) else each.detach().cpu().numpy()
            for each in batch), {})

    def loss(self, loss: torch.Tensor) -> None:
        """Record the loss of this rank."""
        if not hasattr(loss, 'detach'):
            raise TypeError(f'loss must be a tensor with one element, not {type(loss).__name__}')
        self._recording.record_loss(loss.detach().cpu().numpy())

    def close(self) -> None:
        """Close the files; later steps are not recorded."""
        self._recording.close()

    def _end(self) -> None:
        if not self._has_begun:
            warnings.warn('TorchRecord has recorded nothing; call its method begin(batch) before '
                          'each step', RuntimeWarning, stacklevel=4)
            self._has_begun = True
        self._recording.end(self._training)
        self._training.t += 1


class _Training:
    """A PyTorch optimizer and its module, with the attributes that a recording reads."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        import torch

        self._module = module
        self.target, self.t = self, 0
        self.optimizer_name = type(optimizer).__name__
        self.hyperparam = types.SimpleNamespace(get_dict=lambda: {
            key: value for key, value in optimizer.param_groups[0].items() if key != 'params'})
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.communicator = types.SimpleNamespace(
                rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size())

    def namedparams(self, include_uninit: bool = True) -> Iterator[tuple[str, _TorchParameter]]:
        for name, tensor in self._module.named_parameters():
            yield '/' + name.removeprefix('module.').replace('.', '/'), _TorchParameter(tensor)

    def params(self, include_uninit: bool = True) -> Iterator[_TorchParameter]:
        return (param for _, param in self.namedparams())

    def namedlinks(self) -> Iterator[tuple[str, object]]:
        return iter(())


class _TorchParameter:
    def __init__(self, tensor: torch.nn.Parameter) -> None:
        self._tensor = tensor

    @property
    def array(self) -> np.ndarray:
        return self._tensor.detach().cpu().numpy()

    @property
    def grad(self) -> np.ndarray | None:
        return None if self._tensor.grad is None else self._tensor.grad.detach().cpu().numpy()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype
