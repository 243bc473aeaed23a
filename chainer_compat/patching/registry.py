"""The registry of shims.

A shim applies to modules of Chainer. There are two kinds: some edit the source of a module before
Python compiles it, others patch the module after execution. Shims do not modify files, CuPy,
setuptools or NumPy, except that ``removed_aliases`` extends an error message of NumPy.

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
#: Names of modules of old versions, and their current names.
moved: dict[str, str] = {}


def edit(*names: str) -> Callable[[Edit], Edit]:
    """Register a shim that edits the source of the modules ``names``.

    The shim is called without arguments when a module is imported, and returns a dictionary of
    replacements, or ``{}`` for versions that do not need any. Strings that are not found are
    ignored, because Chainer may already be patched. Keep the number of lines, so that tracebacks,
    pdb and inspect.getsource match the file. A string must not span several functions or classes.
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
    """Return whether ``shim`` edits anything with the imported packages; true for all patches."""
    return any(shim in shims for shims in patches.values()) or shim() != {}


def version(name: str) -> tuple[int, int]:
    """Return the major and minor version of the package ``name``; (0, 0) if it is not imported.

    Chainer imports NumPy and CuPy before any module that needs a shim.
    """
    major, minor = getattr(sys.modules.get(name), '__version__', '0.0').split('.')[:2]
    return int(major), int(minor)
