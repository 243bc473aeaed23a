"""Names of CuPy 1 to 12 that CuPy removed: ``CHAINER_COMPAT_NAMES=all`` restores them.

Nothing is imported or defined until a name is used. Names that CuPy still has are not replaced.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from chainer_compat.names import cupy_kernels
from chainer_compat.names.cupy_table import (
    ARGUMENTS,
    ELSEWHERE,
    MODULES,
    NAMES,
    REMOVED,
    UNDERSCORED,
)
from chainer_compat.patching import loader

VARIABLE = 'CHAINER_COMPAT_NAMES'
HINT = (f'{VARIABLE}=all restores names that CuPy removed; set this environment variable to run '
        'old code unchanged.')


def _with_old_arguments(function: Callable[..., Any], arguments: dict[str, str | None]
               ) -> Callable[..., Any]:
    """Return a wrapper of ``function`` that also accepts the old names of its arguments."""
    try:
        known = set(inspect.signature(function).parameters)
    except ValueError:  # written in C
        known = set()

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        given = {old: options.pop(old) for old in arguments if old in options and old not in known}
        options |= {new: given.pop(old) for old, new in arguments.items()
                    if old in given and new is not None and not new.startswith('.')}
        result = function(*args, **options)
        for old, value in given.items():
            method = arguments[old]
            if method is not None and value is not None:
                result = getattr(result, method[1:])(value)
        return result

    return call


def current(name: str) -> str | None:
    """Return the current name of an old module.

    Args:
        name: Name of a module, such as ``cupy.core.core``.

    Returns:
        The current name, such as ``cupy._core.core``; ``None`` if ``name`` is not an old
            module.
    """
    if name in MODULES:
        return MODULES[name]
    parent, _, child = name.rpartition('.')
    package = current(parent) if parent else None
    moved = f'{package or parent}.{child}'
    if moved in MODULES:
        return MODULES[moved]
    if child in UNDERSCORED.get(package or parent, ()):
        return f'{package or parent}._{child}'
    return moved if package else None


def _advice(*names: str | None) -> str | None:
    """Return advice on a name that has no equivalent.

    Args:
        names: The name that the user wrote, and the current name.

    Returns:
        A sentence, or ``None``.
    """
    return next((advice for pattern, advice in REMOVED.items()
                 if any(name and fnmatch.fnmatchcase(name, pattern) for name in names)), None)


def find_path(path: str) -> Any:
    """Return a module, or an object inside a module.

    Args:
        path: Dotted path, such as ``cupy.cuda.nccl.available``.

    Returns:
        The module or object.

    Raises:
        ImportError: If it does not exist.
    """
    parent, _, name = path.rpartition('.')
    if not parent:
        return importlib.import_module(path)
    owner = find_path(parent)
    if not isinstance(owner, ModuleType):
        return getattr(owner, name)
    if name in vars(owner):
        return vars(owner)[name]
    missing = vars(owner).get('__getattr__')
    try:
        # CuPy 14 loads CUDA libraries here, not when their modules are imported.
        return missing.find(name) if isinstance(missing, MissingName) else getattr(owner, name)
    except AttributeError:
        return importlib.import_module(path)


def _find_quietly(path: str) -> Any:
    """Return the object at a path, without CuPy's warning about a missing library."""
    if not path.endswith('.available'):
        return find_path(path)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return find_path(path)


#: Old names that this process has used, and their current names.
used: dict[str, str] = {}


def is_on() -> bool:
    """Return whether old names are to be restored."""
    return os.environ.get(VARIABLE) == 'all'


class MissingName:
    """The ``__getattr__`` of a module, which finds its old names."""

    def __init__(self, module: ModuleType) -> None:
        """Store the original ``__getattr__`` of the module."""
        self.module = module
        self.find: Callable[[str], Any] = vars(module).get('__getattr__', self._raise)

    def _raise(self, name: str) -> Any:
        raise AttributeError(f'module {self.module.__name__!r} has no attribute {name!r}',
                             name=name, obj=self.module)

    def __call__(self, name: str) -> Any:
        """Return the object of an old name; if names are not restored, the error explains how."""
        try:
            return self.find(name)
        except AttributeError as error:
            path = None if name.startswith('__') else self._path(name)
            if path is not None and is_on():
                try:
                    value = _find_quietly(path) if isinstance(path, str) else path
                except ImportError as why:
                    raise AttributeError(f'{error}\n{why}', name=None) from why
                setattr(self.module, name, value)
                old = f'{self.module.__name__}.{name}'
                if path != old:  # otherwise, it is a module, which _load adds
                    used[old] = str(path)
                return value
            advice = HINT if path is not None else _advice(f'{self.module.__name__}.{name}')
            if advice is None or name.startswith('__'):
                raise
            # name=None: otherwise, Python appends a similar name to the last line.
            raise AttributeError(f'{error}\n{advice}', name=None) from None

    def _path(self, name: str) -> str | int | None:
        """Return the current path of an old name, or its value."""
        module = self.module.__name__
        if name in NAMES.get(module, ()):
            return NAMES[module][name]
        if current(f'{module}.{name}'):
            return f'{module}.{name}'
        return next((f'{place}.{name}' for place in ELSEWHERE.get(_package(module), ())
                     if place != module and name in vars(sys.modules[place])), None)


_COMPLETED = {
    *NAMES, *UNDERSCORED, *ARGUMENTS, *(name.rpartition('.')[0] for name in [*MODULES, *REMOVED])}


def _package(module: str) -> str:
    return '.'.join(module.split('.')[:2])


def _has_old_names(module: str) -> bool:
    return module in _COMPLETED or _package(module) in ELSEWHERE


def complete(module: ModuleType) -> None:
    """Make a CuPy module find its old names. Idempotent.

    Args:
        module: The module, after execution.
    """
    names, here = vars(module), module.__name__
    if not isinstance(names.get('__getattr__'), MissingName):
        names['__getattr__'] = MissingName(module)
    if not is_on() or _RESTORED in names:
        return
    names[_RESTORED] = True
    for function, arguments in ARGUMENTS.get(here, {}).items():
        *classes, name = function.split('.')
        owner = getattr(module, classes[0], None) if classes else module
        if hasattr(owner, name):
            setattr(owner, name, _with_old_arguments(getattr(owner, name), arguments))
    if here == 'cupy.cuda.compiler' and cupy_kernels.headers_differ():
        names['_compile_module_with_cache'] = cupy_kernels.with_old_sources(
            names['_compile_module_with_cache'])
    _keep_functions(here, module)


_RESTORED = '_chainer_compat_restored'


def _keep_functions(old: str, package: ModuleType) -> None:
    """Register old modules that have the same name as a function, so the function is kept.

    Otherwise, ``import cupy.fft.fft`` would replace the function ``cupy.fft.fft`` with the module.
    """
    for child in UNDERSCORED.get(package.__name__, ()):
        moved = sys.modules.get(f'{package.__name__}._{child}')
        if child in vars(package) and moved is not None:
            sys.modules.setdefault(f'{old}.{child}', moved)


def _load(old: str, now: str) -> ModuleType:
    """Return the module that replaces an old module."""
    try:
        module: ModuleType = find_path(now)
    except ModuleNotFoundError as error:
        why = _advice(old, now) or error
        raise ModuleNotFoundError(f'No module named {old!r}\n{why}') from error
    _keep_functions(old, module)
    used[old] = now
    return module


def _is_import() -> bool:
    """Return whether Python is importing a module, not only checking whether it exists."""
    frame = sys._getframe()
    while frame.f_code.co_name != '_find_spec' and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_back is not None and frame.f_back.f_code.co_name == '_find_and_load_unlocked'


def find_spec(caller: Any, name: str, path: Any, target: Any) -> ModuleSpec | None:
    """Return the spec of an old module, or of a module that has old names.

    Args:
        caller: The finder that calls this function.
        name: Name of the module.
        path: Folders of the parent package.
        target: The module, if it is being reloaded.

    Returns:
        The spec, or ``None`` to let other finders find the module.

    Raises:
        ModuleNotFoundError: If the module is an old one and old names are not restored.
    """
    now = current(name)
    if now is None and name not in REMOVED and not _has_old_names(name):
        return None
    parent = name.rpartition('.')[0]
    if not parent or getattr(sys.modules.get(parent), '__name__', parent) == parent:
        spec = loader.find_original_spec(caller, name, path, target)
        if spec is not None and spec.loader is not None and _has_old_names(name):
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                complete(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        if spec is not None or (now is None and name not in REMOVED):
            return spec
    if now is not None and is_on():
        return ModuleSpec(name, loader.MovedLoader(functools.partial(_load, name, now)))
    if not _is_import():
        return None
    # Omit name=: otherwise, ``from cupy import core`` does not show the message.
    raise ModuleNotFoundError(f'No module named {name!r}\n{REMOVED.get(name, HINT)}')


class CupyFinder:
    """Finds current and old modules of CuPy if ``ChainerFinder`` is not used."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Handle the imports of CuPy's modules."""
        return find_spec(cls, name, path, target) if name.startswith('cupy') else None


def restore() -> None:
    """Restore the names of modules that have already been imported."""
    for name, module in list(sys.modules.items()):
        if _has_old_names(name) and module.__name__ == name:
            complete(module)
