"""Names of a package that are imported at their first use: most programs use few of them."""
from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping


def attribute(package: str, name: str, modules: Mapping[str, str]) -> object:
    """Return a name of a package, for its ``__getattr__``.

    Args:
        package: The package.
        name: The name.
        modules: By name, the module that defines it, or that has this name.

    Raises:
        AttributeError: If the package does not have this name.
    """
    if name not in modules:
        raise AttributeError(f'module {package!r} has no attribute {name!r}', name=name)
    module = importlib.import_module(modules[name])
    value = module if module.__name__ == f'{package}.{name}' else getattr(module, name)
    setattr(sys.modules[package], name, value)
    return value
