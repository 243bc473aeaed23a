"""Decides for each call whether PyTorch or Chainer computes it."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from chainer_compat.graph.settings import OptionError, OptionWarning, raises_errors
from chainer_compat.pytorch.availability import is_imported, why_not_on_gpu, why_unavailable
from chainer_compat.pytorch.unsupported import Unsupported

if TYPE_CHECKING:
    from chainer import FunctionNode, Variable

MODES = ('auto', 'always', 'never')

P = ParamSpec('P')
R = TypeVar('R')


def default_mode() -> str:
    """Return the initial value of ``chainer.config.use_torch``.

    Raises:
        ValueError: If the environment variable has an invalid value.
    """
    mode = os.environ.get('CHAINER_USE_TORCH') or 'auto'
    if mode not in MODES:
        raise ValueError(f'CHAINER_USE_TORCH is {mode!r}. Use one of {", ".join(MODES)}.')
    return mode


def advising(original: Callable[P, R]) -> Callable[P, R]:
    """Wrap a GPU convolution: if it is slow, its first call warns and gives the reason."""
    @functools.wraps(original)
    def convolve(*args: P.args, **kwargs: P.kwargs) -> R:
        from chainer import config

        global _has_advised
        if not _has_advised and config.use_torch == 'auto':
            _has_advised = True
            array: Any = args[1]
            if advice := why_not_on_gpu(array.data.device_id):
                warnings.warn(advice[0].upper() + advice[1:], stacklevel=2)
        return original(*args, **kwargs)

    return convolve


_has_advised = False


def replace(module: ModuleType, name: str, kernel: str,
            is_worth_importing: Callable[..., bool] | None = None) -> None:
    """Make a function call a kernel, or the original where the kernel does not apply.

    Args:
        module: The module of the function.
        name: The name of a function of the module, or of a class and its method.
        kernel: The name of a module of ``kernels`` and its function, which takes the same arguments
            as the original.
        is_worth_importing: See :func:`with_kernel`.
    """
    *path, attribute = name.split('.')
    owner = functools.reduce(getattr, path, module)
    setattr(owner, attribute, with_kernel(kernel, is_worth_importing)(getattr(owner, attribute)))


def record_first(f: FunctionNode, inputs: Sequence[Any], local: dict[str, Any]
                 ) -> tuple[Variable, ...] | Exception | None:
    """Import PyTorch at the first call of a Chainer function, then record that call.

    This way, later calls round like the first one, and resumed training is bitwise identical to
    uninterrupted training.

    Args:
        f: The function.
        inputs: Its inputs.
        local: The configuration of this thread.

    Returns:
        Same as ``recording.record``.
    """
    import numpy as np
    from chainer import Variable
    from chainer.configuration import global_config

    from chainer_compat.graph import nodes

    if not type(f).__module__.startswith('chainer.functions.') or (
            local.get('use_torch', global_config.use_torch) not in ('auto', 'always')):
        return None
    arrays = [x._data[0] if isinstance(x, Variable) else x for x in inputs]
    if not any(type(x) is np.ndarray and x.dtype.char in 'fd' for x in arrays):
        return None
    if why_unavailable():
        nodes.record = None
    return None if nodes.record is None else nodes.record(f, inputs, local)


def with_kernel(name: str, is_worth_importing: Callable[..., bool] | None = None
                ) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes a function call a kernel where the kernel applies.

    Args:
        name: The name of a module of ``kernels`` and its function, which takes the same arguments
            as the decorated function.
        is_worth_importing: Function that returns whether a call may import PyTorch. By default,
            every call may.
    """
    return lambda original: _dispatched(original, name, is_worth_importing)


def _dispatched(original: Callable[P, R], name: str,
                is_worth_importing: Callable[..., bool] | None) -> Callable[P, R]:
    from chainer.configuration import config, global_config

    @functools.cache
    def kernel() -> Callable[P, R]:
        family, function = name.split('.')
        module = importlib.import_module(f'chainer_compat.pytorch.kernels.{family}')
        found: Callable[P, R] = getattr(module, function)
        return found

    @functools.wraps(original)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        local = config._local.__dict__  # like getattr(config, ...), in a third of the time
        mode = (local['use_torch'] if 'use_torch' in local
                else getattr(global_config, 'use_torch', 'never'))  # 'never' without the patches
        if mode not in MODES:
            raise ValueError(
                f'chainer.config.use_torch is {mode!r}. Use one of {", ".join(MODES)}.')
        failure: Exception | None = None
        if mode != 'never' and (is_worth_importing is None or is_imported()
                                or is_worth_importing(*args, **kwargs)) and (
                not why_unavailable() and not raises_errors()):
            try:
                return kernel()(*args, **kwargs)
            except Unsupported:
                pass
            except (OptionError, OptionWarning):  # a warning that is turned into an error
                raise
            except Exception as error:  # invalid arguments, for which Chainer raises other errors
                failure = error
        result = original(*args, **kwargs)
        if failure is not None:
            warnings.warn(f'PyTorch kernel {name} failed, so Chainer computed the result instead '
                          '(CHAINER_USE_TORCH=never disables the kernels): '
                          f'{type(failure).__name__}: {failure}', stacklevel=2)
        return result

    return function
