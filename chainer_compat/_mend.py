"""The registry of shims, and the loader that applies them while a module is imported.

A shim belongs to a module of Chainer and is one of two kinds: it edits the module's source
before Python compiles it, or it patches the module after it ran. Neither leaves anything in
NumPy, CuPy or setuptools, and neither touches a file.

Edited code is compiled at every import, since Chainer's .pyc files hold, and keep, the original.
That takes long, so it is done only to the functions and classes of a module that differ.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

Edit = Callable[[], dict[str, str]]
Patch = Callable[[ModuleType], None]

edits: dict[str, list[Edit]] = {}
patches: dict[str, list[Patch]] = {}

# Around each function and class of a module PEP 8 wants two blank lines.
BETWEEN = '\n\n\n'


def edit(*names: str) -> Callable[[Edit], Edit]:
    """Registers a shim that edits the source of the modules ``names``.

    The shim is called when the module is imported, takes nothing, and returns what to
    replace with what: ``{}`` for versions that do not need it. A text that the module does not
    hold is left: somebody's Chainer is mended already. Keep the number of lines, so that
    tracebacks, pdb and inspect.getsource agree with the file. A text stands within one
    function, class, or part of the module between two of them.
    """

    def register(shim: Edit) -> Edit:
        for name in names:
            edits.setdefault(name, []).append(shim)
        return shim

    return register


def patch(*names: str) -> Callable[[Patch], Patch]:
    """Registers a shim that is called with each of the modules ``names`` after it ran."""

    def register(shim: Patch) -> Patch:
        for name in names:
            patches.setdefault(name, []).append(shim)
        return shim

    return register


def find_shims() -> list[Edit | Patch]:
    """Returns every shim once, in the order of their names."""
    import chainer_compat.shims  # noqa: F401  (fills the registry)

    found: set[Edit | Patch] = set()
    for table in (edits, patches):
        for shims in table.values():
            found.update(shims)
    return sorted(found, key=lambda shim: shim.__name__)


def modules_of(shim: Edit | Patch) -> list[str]:
    """Returns the names of the modules that ``shim`` mends."""
    return [name for table in (edits, patches) for name, shims in table.items() if shim in shims]


def in_effect(shim: Any) -> bool:
    """Says whether ``shim`` edits for the versions that are imported; a patch decides by itself."""
    return any(shim in shims for shims in patches.values()) or shim() != {}


def version(name: str) -> tuple[int, int]:
    """Returns major and minor version of the package ``name``; (0, 0) if it is not imported.

    Chainer has imported NumPy, and CuPy if it can, before any module that needs a shim runs.
    """
    major, minor = getattr(sys.modules.get(name), '__version__', '0.0').split('.')[:2]
    return int(major), int(minor)


def find_spec(asking: Any, name: str, path: Any, target: Any) -> ModuleSpec | None:
    """Returns what the finders other than ``asking`` find, with our loader if a shim needs it."""
    import chainer_compat.shims  # noqa: F401  (fills the registry)

    if name not in edits and name not in patches:
        return None
    for finder in sys.meta_path:
        spec = None if finder is asking else finder.find_spec(name, path, target)
        if spec is not None:
            # Another kind of loader has no source to edit (a frozen application, a zip).
            if type(spec.loader) is SourceFileLoader:
                spec.loader = MendingLoader(spec.loader.name, spec.loader.path)
            return spec
    return None


class MendingLoader(SourceFileLoader):
    """Loads one module of Chainer with its shims."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Returns the compiled source, edited if a shim wants that."""
        texts = {old: new for shim in edits.get(fullname, ()) for old, new in shim().items()}
        if not texts:
            return super().get_code(fullname)
        source = importlib.util.decode_source(self.get_data(self.path))
        blocks = [(old, _edited(old, texts)) for old in source.split(BETWEEN)]
        if any(new != old and not _defines(old) for old, new in blocks):
            return self._compiled(new for _, new in blocks)
        # Blank lines in place of the functions and classes that stay: line numbers must not change.
        few = self._compiled('\n' * old.count('\n') if new == old and _defines(old) else new
                             for old, new in blocks)
        code = super().get_code(fullname)
        return code and _with_definitions(code, few)

    def _compiled(self, blocks: Iterable[str]) -> CodeType:
        return self.source_to_code(BETWEEN.join(blocks).encode(), self.path)

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, then its patches."""
        super().exec_module(module)
        for shim in patches.get(module.__name__, ()):
            shim(module)


def _edited(text: str, texts: dict[str, str]) -> str:
    for old, new in texts.items():
        text = text.replace(old, new)
    return text


def _defines(block: str) -> bool:
    return block.startswith(('def ', 'class ', '@'))


def _with_definitions(code: CodeType, few: CodeType) -> CodeType:
    """Returns the module's ``code`` with those functions and classes that ``few`` has, too."""
    found = {(c.co_name, c.co_firstlineno): c for c in few.co_consts if isinstance(c, CodeType)}
    return code.replace(co_consts=tuple(
        found.get((c.co_name, c.co_firstlineno), c) if isinstance(c, CodeType) else c
        for c in code.co_consts))
