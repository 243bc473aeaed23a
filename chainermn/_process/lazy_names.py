"""Names of a package that are imported on first use, because most scripts use only a few."""
from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping


def attribute(package: str, name: str, modules: Mapping[str, str]) -> object:
    """Return the object with a name in a package, for the package's ``__getattr__``.

    Args:
        package: The name of the package.
        name: The name.
        modules: The module for each name: the module that defines it, or the submodule of this
            name.

    Raises:
        AttributeError: If the package does not have this name.
    """
    if name not in modules:
        raise AttributeError(f'module {package!r} has no attribute {name!r}', name=name)
    module = importlib.import_module(modules[name])
    value = module if module.__name__ == f'{package}.{name}' else getattr(module, name)
    setattr(sys.modules[package], name, value)
    return value
