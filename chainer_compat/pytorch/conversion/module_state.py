"""The tensors of a module, registered by Chainer's names."""

from __future__ import annotations

import keyword
from collections.abc import Mapping

import torch

from chainer_compat.pytorch.conversion.errors import ConversionError


def add_tensors(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Register parameters and buffers by their dotted names.

    Raises:
        ConversionError: If a module cannot have such a name.
    """
    for name, tensor in tensors.items():
        *path, last = name.split('.')
        owner = module
        for part in path:
            if part not in owner._modules:
                _check_name(owner, part, name)
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        if last not in owner._parameters and last not in owner._buffers:
            _check_name(owner, last, name)
        if isinstance(tensor, torch.nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            owner.register_buffer(last, tensor)


def _check_name(module: torch.nn.Module, part: str, name: str) -> None:
    if hasattr(module, part) or keyword.iskeyword(part):
        raise ConversionError(f'{name} contains a name that modules of PyTorch cannot have: {part}')
