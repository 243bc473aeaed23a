"""The option ``chainer.config.fused_updates``: whether PyTorch updates parameters."""

from __future__ import annotations

import os

from chainer_compat.graph.settings import OptionError

#: By value of the environment variable.
_FUSED_UPDATES: dict[str, bool | str] = {'auto': 'auto', '0': False, '1': True}


def default_fused_updates() -> bool | str:
    """Return the initial value of ``chainer.config.fused_updates``.

    Raises:
        ValueError: If the environment variable has another value.
    """
    value = os.environ.get('CHAINER_FUSED_UPDATES') or 'auto'
    if value not in _FUSED_UPDATES:
        raise ValueError(
            f'CHAINER_FUSED_UPDATES is {value!r}. Use one of {", ".join(_FUSED_UPDATES)}.')
    return _FUSED_UPDATES[value]


def fused_updates() -> bool | str:
    """Return ``chainer.config.fused_updates``.

    Raises:
        OptionError: If it has another value than True, False and 'auto'.
    """
    from chainer import config

    value = getattr(config, 'fused_updates', False)  # False: without the patches
    if value not in (True, False, 'auto'):
        raise OptionError(
            f"chainer.config.fused_updates is {value!r}. Use one of True, False, 'auto'.")
    return value
