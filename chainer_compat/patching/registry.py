"""The registry of shims.

A shim applies to modules of Chainer and is one of two kinds: it edits the source of a module
before Python compiles it, or it patches the module after execution. Neither kind modifies CuPy,
setuptools or any file, nor NumPy, apart from the error message of ``removed_aliases``.

Importing ``chainer_compat.shims`` fills the registry, and ``loader`` applies it.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Edit = Callable[[], dict[str, str]]
Patch = Callable[[ModuleType], None]

edits: dict[str, list[Edit]] = {}
patches: dict[str, list[Patch]] = {}
#: Modules of old versions, which are now elsewhere.
moved: dict[str, str] = {}


def edit(*names: str) -> Callable[[Edit], Edit]:
    """Register a shim that edits the source of the modules ``names``.

    The shim is called without arguments when a module is imported, and returns a dictionary of
    replacements, ``{}`` for versions that do not need any. Texts that are not found are ignored,
    as Chainer may be patched already. Keep the number of lines, so that tracebacks, pdb and
    inspect.getsource match the file. A text must not span several functions or classes.
    """

    def register(shim: Edit) -> Edit:
        for name in names:
            edits.setdefault(name, []).append(shim)
        return shim

    return register


def patch(*names: str) -> Callable[[Patch], Patch]:
    """Register a shim that is called with each of the modules ``names`` after execution."""

    def register(shim: Patch) -> Patch:
        for name in names:
            patches.setdefault(name, []).append(shim)
        return shim

    return register


def find_shims() -> list[Edit | Patch]:
    """Return all shims in the registry, sorted by name."""
    found: set[Edit | Patch] = set()
    for table in (edits, patches):
        for shims in table.values():
            found.update(shims)
    return sorted(found, key=lambda shim: shim.__name__)


def modules_of(shim: Edit | Patch) -> list[str]:
    """Return the names of the modules that ``shim`` applies to."""
    return [name for table in (edits, patches) for name, shims in table.items() if shim in shims]


def is_active(shim: Any) -> bool:
    """Return whether ``shim`` edits anything with the imported versions; true for patches."""
    return any(shim in shims for shims in patches.values()) or shim() != {}


def version(name: str) -> tuple[int, int]:
    """Return major and minor version of the package ``name``; (0, 0) if it is not imported.

    Chainer imports NumPy and CuPy before any module that needs a shim.
    """
    major, minor = getattr(sys.modules.get(name), '__version__', '0.0').split('.')[:2]
    return int(major), int(minor)
