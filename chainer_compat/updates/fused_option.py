"""The option ``chainer.config.fused_updates``: whether PyTorch updates parameters."""

from __future__ import annotations

import os

from chainer_compat.graph.settings import OptionError
from chainer_compat.patching import variables

_VARIABLE = 'CHAINER_FUSED_UPDATES'


def default_fused_updates() -> bool | str:
    """Return the initial value of ``chainer.config.fused_updates``.

    Raises:
        ValueError: If the environment variable has an invalid value.
    """
    value = os.environ.get(_VARIABLE, '').strip().lower()
    if value in ('', 'auto'):
        return 'auto'
    if value not in variables.FLAGS:
        raise ValueError(f'{_VARIABLE} is {os.environ[_VARIABLE]!r}. Use auto; 1, true, yes or on; '
                         '0, false, no or off; or unset it.')
    return variables.FLAGS[value]


def fused_updates() -> bool | str:
    """Return ``chainer.config.fused_updates``.

    Raises:
        OptionError: If it is not True, False or 'auto'.
    """
    from chainer import config

    value = getattr(config, 'fused_updates', False)  # False without the patches
    if value not in (True, False, 'auto'):
        raise OptionError(
            f"chainer.config.fused_updates is {value!r}. Use True, False or 'auto'.")
    return value
