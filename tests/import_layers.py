"""The layers of both packages, and what their modules import."""

import ast
import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Iterator


@functools.cache
def nodes(path: pathlib.Path) -> list[ast.AST]:
    """Return the nodes of the syntax tree of a file."""
    return [*ast.walk(ast.parse(path.read_text(encoding='utf-8')))]


@dataclasses.dataclass
class Package:
    """A package whose parts import only from themselves and from parts in lower layers.

    Args:
        name: Name of the package.
        layers: The parts of each layer, with the highest layer first. A part is a module of the
            package or a folder of modules.
    """

    name: str
    layers: list[set[str]]

    def __post_init__(self) -> None:
        file = importlib.import_module(self.name).__file__
        assert file is not None
        self.root = pathlib.Path(file).parent
        #: Files relative to the package. A wheel of chainer_compat also contains chainermn.
        self.files = sorted(path for path in (p.relative_to(self.root) for p in self.root.rglob(
            '*.py')) if '_overlay' not in path.parts)
        self.levels = {part: -level for level, parts in enumerate(self.layers) for part in parts}

    def nodes(self, path: pathlib.Path) -> list[ast.AST]:
        """Return the nodes of the syntax tree of a file."""
        return nodes(self.root / path)

    def imported(self, path: pathlib.Path) -> Iterator[str]:
        """Yield the dotted names of all imports in a file, including imports in functions."""
        for node in self.nodes(path):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, (
                    f'{path}:{node.lineno} is a relative import; use {self.name}....')
                # "from chainermn import nccl" may name a module
                yield from (f'{node.module}.{alias.name}' for alias in node.names)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith('import_module'):
                yield from (name.value for name in node.args
                            if isinstance(name, ast.Constant) and isinstance(name.value, str))

    def part(self, path: pathlib.Path) -> str:
        """Return the part to which a file belongs."""
        return path.parts[0].removesuffix('.py')

    def upward(self, path: pathlib.Path) -> Iterator[str]:
        """Yield errors for imports from layers that are not below the file's layer."""
        here = self.part(path)
        for name in self.imported(path):
            package, *rest = name.split('.')
            if package != self.name:
                continue
            there = rest[0] if rest else '__init__'
            if there not in self.levels:  # "from chainermn import create_communicator"
                yield f'{name}: import from the module that defines the name, not from the facade'
            elif here != there and self.levels[there] >= self.levels[here]:
                yield f'{name}: {there} is not below {here}'

    def graph(self) -> dict[str, set[str]]:
        """Return the modules that each module imports, including imports in functions."""
        modules = {}
        for path in self.files:
            parts = [self.name, *path.with_suffix('').parts]
            modules['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = path
        found = {}
        for module, path in modules.items():
            names = {name if name in modules else name.rpartition('.')[0]
                     for name in self.imported(path)}
            found[module] = names & set(modules) - {module}
        return found


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules in import cycles, and the modules on paths between cycles."""
    left = {module: set(names) for module, names in graph.items()}
    while True:
        used = set().union(*left.values())
        done = [module for module in left if not left[module] or module not in used]
        if not done:
            return sorted(left)
        for module in done:
            del left[module]
        left = {module: names & set(left) for module, names in left.items()}


CHAINERMN = Package('chainermn', [
    {'__init__', '__main__'},
    {'_at_import'},
    {'_commands', 'datasets', 'extensions', 'iterators', 'kvstore', 'links', 'testing'},
    {'functions', 'optimizers'},
    {'communicators'},
    {'_collectives'},
    {'_gradients'},
    {'_transport'},
    {'_consistency'},
    {'_diagnostics'},
    {'_records', '_shards', '_timeline', 'global_except_hook', 'nccl'},
    {'_operations'},
    {'_process', '_types', '_version'},
])

CHAINER_COMPAT = Package('chainer_compat', [
    {'__main__'},
    {'__init__'},
    {'early_failures', 'shims'},
    {'pytorch'},
    {'dialect', 'fixes', 'updates'},
    {'graph', 'names'},
    {'patching'},
])

PACKAGES = [CHAINERMN, CHAINER_COMPAT]
