"""The loader that applies shims while a Chainer module is imported.

Chainer's .pyc files still contain the original code. Edited code has separate .pyc files, next to
those of this package. If they cannot be written, the code is compiled at every import. Because
this is slow, only the functions and classes that differ are compiled.
"""

import importlib
import importlib.util
import marshal
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from chainer_compat.patching.registry import edits, moved, patches

# PEP 8 asks for two blank lines around functions and classes.
BETWEEN = '\n\n\n'


def find_spec(caller: Any, name: str, path: Any, target: Any) -> ModuleSpec | None:
    """Return the spec of a Chainer module, with a patching loader; ``None`` if it has no shims."""
    if name in moved:
        return ModuleSpec(name, MovedLoader(partial(importlib.import_module, moved[name])))
    if name not in edits and name not in patches:
        return None
    spec = find_original_spec(caller, name, path, target)
    # Other loaders have no source file (frozen applications, zip files).
    if spec is not None and type(spec.loader) is SourceFileLoader:
        spec.loader = PatchingLoader(spec.loader.name, spec.loader.path)
    return spec


def find_original_spec(caller: Any, name: str, path: Any, target: Any) -> ModuleSpec | None:
    """Return the spec that the other finders find; ``caller`` is the calling finder."""
    others = (finder for finder in sys.meta_path if finder is not caller)
    return next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)


class PatchingLoader(SourceFileLoader):
    """Loads a module of Chainer and applies its shims."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the compiled source, with the edits of the shims."""
        texts = {old: new for shim in edits.get(fullname, ()) for old, new in shim().items()}
        if not texts:
            return super().get_code(fullname)
        data = self.get_data(self.path)
        key = importlib.util.MAGIC_NUMBER + importlib.util.source_hash(
            data + repr([self.path, *sorted(texts.items())]).encode())
        cache = importlib.util.cache_from_source(
            os.path.join(os.path.dirname(os.path.dirname(__file__)), f'{fullname}.py'))
        code = self._cached(cache, key)
        if code is None:
            code = self._edited_code(fullname, importlib.util.decode_source(data), texts)
            if code is not None and not sys.dont_write_bytecode:
                self.set_data(cache, key + marshal.dumps(code))  # no error if that is not allowed
        return code

    def _cached(self, cache: str, key: bytes) -> CodeType | None:
        """Return the code that an earlier process compiled with the same edits, if any."""
        try:
            data = self.get_data(cache)
            code = marshal.loads(data[len(key):]) if data.startswith(key) else None
        except (OSError, EOFError, ValueError, TypeError):  # a truncated file
            return None
        return code if isinstance(code, CodeType) else None

    def _edited_code(self, fullname: str, source: str, texts: dict[str, str]) -> CodeType | None:
        blocks = [(old, _edited(old, texts)) for old in source.split(BETWEEN)]
        if any(new != old and not _defines(old) for old, new in blocks):
            return self._compiled(new for _, new in blocks)
        # Replace unchanged functions and classes with blank lines to keep the line numbers.
        few = self._compiled('\n' * old.count('\n') if new == old and _defines(old) else new
                             for old, new in blocks)
        code = super().get_code(fullname)
        return code and _with_definitions(code, few)

    def _compiled(self, blocks: Iterable[str]) -> CodeType:
        return self.source_to_code(BETWEEN.join(blocks).encode(), self.path)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then its patches."""
        super().exec_module(module)
        for shim in patches.get(module.__name__, ()):
            shim(module)


class MovedLoader(Loader):
    """Loads the module that replaces a module of an old version."""

    def __init__(self, find: Callable[[], ModuleType]) -> None:
        """Use the module that ``find`` returns."""
        self.find = find

    def exec_module(self, module: ModuleType) -> None:
        """Replace the new module with the current one."""
        sys.modules[module.__name__] = self.find()


def _edited(text: str, texts: dict[str, str]) -> str:
    for old, new in texts.items():
        text = text.replace(old, new)
    return text


def _defines(block: str) -> bool:
    return block.startswith(('def ', 'class ', '@'))


def _with_definitions(code: CodeType, few: CodeType) -> CodeType:
    """Return ``code``, but with the functions and classes of ``few`` where both have them."""
    found = {(c.co_name, c.co_firstlineno): c for c in few.co_consts if isinstance(c, CodeType)}
    return code.replace(co_consts=tuple(
        found.get((c.co_name, c.co_firstlineno), c) if isinstance(c, CodeType) else c
        for c in code.co_consts))
