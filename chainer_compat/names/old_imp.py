"""Functions of the module ``imp``, which Python 3.12 removed, for existing programs."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from importlib import reload
from types import ModuleType
from typing import IO

__all__ = ['C_BUILTIN', 'C_EXTENSION', 'PKG_DIRECTORY', 'PY_COMPILED', 'PY_SOURCE', 'acquire_lock',
           'cache_from_source', 'find_module', 'get_suffixes', 'get_tag', 'load_compiled',
           'load_module', 'load_package', 'load_source', 'lock_held', 'new_module', 'release_lock',
           'reload', 'source_from_cache']

PY_SOURCE, PY_COMPILED, C_EXTENSION, PKG_DIRECTORY, C_BUILTIN = 1, 2, 3, 5, 6

Description = tuple[str, str, int]

cache_from_source = importlib.util.cache_from_source
new_module = ModuleType
source_from_cache = importlib.util.source_from_cache


def get_tag() -> str | None:
    """Return the tag that this Python uses in the names of .pyc files."""
    return sys.implementation.cache_tag


def get_suffixes() -> list[Description]:
    """Return the suffixes of module files, how to open them, and their kind."""
    machinery = importlib.machinery
    return [(suffix, mode, kind) for suffixes, mode, kind in [
        (machinery.EXTENSION_SUFFIXES, 'rb', C_EXTENSION),
        (machinery.SOURCE_SUFFIXES, 'r', PY_SOURCE),
        (machinery.BYTECODE_SUFFIXES, 'rb', PY_COMPILED)] for suffix in suffixes]


def find_module(name: str, path: list[str] | None = None
                ) -> tuple[IO[str] | IO[bytes] | None, str | None, Description]:
    """Return the open file of a module, its path and its description."""
    if path is None and name in sys.builtin_module_names:
        return None, None, ('', '', C_BUILTIN)
    for folder in sys.path if path is None else path:
        base = os.path.join(folder, name)
        if os.path.isfile(os.path.join(base, '__init__.py')):
            return None, base, ('', '', PKG_DIRECTORY)
        for suffix, mode, kind in get_suffixes():
            if os.path.isfile(base + suffix):
                encoding = 'utf-8' if kind == PY_SOURCE else None
                return open(base + suffix, mode, encoding=encoding), base + suffix, (
                    suffix, mode, kind)
    raise ImportError(f'No module named {name!r}', name=name)


def load_module(name: str, file: IO[str] | IO[bytes] | None, filename: str | None,
                details: Description) -> ModuleType:
    """Load a module that ``find_module`` found; reload it if it is already loaded."""
    if filename is None:
        return importlib.import_module(name)
    if details[2] == PKG_DIRECTORY:
        return load_package(name, filename)
    return load_source(name, filename)


def load_package(name: str, path: str) -> ModuleType:
    """Load the package in the folder ``path``."""
    return load_source(name, os.path.join(path, '__init__.py'))


def load_source(name: str, pathname: str, file: IO[str] | None = None) -> ModuleType:
    """Load a module from a file with any suffix; reload it if it is already loaded."""
    loader = None  # chosen by the suffix
    if not pathname.endswith(tuple(suffix for suffix, _, _ in get_suffixes())):
        loader = importlib.machinery.SourceFileLoader(name, pathname)
    spec = importlib.util.spec_from_file_location(name, pathname, loader=loader)
    if spec is None or spec.loader is None:
        raise ImportError(f'No module named {name!r} in {pathname!r}', name=name)
    module = sys.modules.get(name)
    if module is None:
        module = importlib.util.module_from_spec(spec)
    else:
        module.__spec__, module.__file__ = spec, pathname
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return sys.modules[name]


load_compiled = load_source


def acquire_lock() -> None:
    """Do nothing: since Python 3.3, each module has a separate lock."""


release_lock = acquire_lock


def lock_held() -> bool:
    """Return false: there is no global import lock."""
    return False
