"""Writes ``old_cupy_names.txt``: what programs could import from CuPy 1 to 12, and now cannot.

``python record_cupy_names.py CUPY CHAINER`` reads clones of both repositories; Chainer 1 contained
CuPy 1. Nothing is imported: names are those that the sources of a module define. A line of the file
is a module that CuPy 13 or 14 do not have, or that lacks names there, and these names.
"""

import argparse
import ast
import collections
import io
import pathlib
import re
import subprocess
import tarfile

HERE = pathlib.Path(__file__).parent
CHAINER = ['v1.3.0', 'v1.6.0', 'v1.24.0']
OLD = [f'v{version}' for version in (
    '2.0.0', '2.5.0', '3.0.0a1', '4.0.0', '4.5.0', '5.0.0', '5.4.0', '6.0.0', '6.7.0', '7.0.0',
    '7.8.0', '8.0.0', '8.6.0', '9.0.0', '9.6.0', '10.0.0', '10.6.0', '11.0.0', '11.6.0', '12.0.0',
    '12.3.0')]
NEW = ['v13.6.0', 'v14.2.0']

Names = dict[str, set[str]]


def read(repository: str, tag: str) -> Names:
    """Return the public names of all public modules of a version."""
    paths = subprocess.run(
        ['git', '-C', repository, 'ls-tree', '--name-only', tag, 'cupy', 'cupyx'],
        check=True, capture_output=True, text=True).stdout.split()
    archive = subprocess.run(['git', '-C', repository, 'archive', tag, *paths],
                             check=True, capture_output=True).stdout
    found: Names = collections.defaultdict(set)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            path = pathlib.PurePath(member.name)
            parts = path.with_suffix('').parts
            package = parts[-1] == '__init__'
            module = parts[:-1] if package else parts
            if path.suffix not in ('.py', '.pyx') or any(
                    part.startswith('_') or '-' in part for part in module):
                continue
            text = tar.extractfile(member).read().decode(errors='replace')
            find = of_python if path.suffix == '.py' else of_cython
            found['.'.join(module)] |= {
                name for name in find(text, package) if not name.startswith('_')}
    return found


def of_python(text: str, package: bool) -> set[str]:
    """Return the names that a module defines; in a package also what it imports from CuPy."""
    found = set()
    bodies = [ast.parse(text).body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found |= {part.id for target in node.targets for part in ast.walk(target)
                          if isinstance(part, ast.Name)}
            elif isinstance(node, ast.ImportFrom) and package:
                if str(node.module).startswith(('cupy', 'numpy')):
                    found |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, (ast.If, ast.Try)):
                bodies += [node.body, node.orelse, *(h.body for h in getattr(node, 'handlers', ()))]
    return found - {'*'}


def of_cython(text: str, package: bool) -> set[str]:
    """Return the names of functions, classes and constants that Python sees."""
    patterns = [r'^(?:cpdef|def)\s+(?:[\w.\[\], *]+?\s+)?\*?(\w+)\s*\(',
                r'^(?:cdef\s+|cpdef\s+)?class\s+(\w+)', r'^(\w+)\s*=[^=]']
    return {name for pattern in patterns for name in re.findall(pattern, text, re.MULTILINE)}


def main() -> None:
    """Compare the versions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('cupy')
    parser.add_argument('chainer')
    args = parser.parse_args()
    old: Names = collections.defaultdict(set)
    for repository, tags in (args.chainer, CHAINER), (args.cupy, OLD):
        for tag in tags:
            for module, names in read(repository, tag).items():
                old[module] |= names
    new = [read(args.cupy, tag) for tag in NEW]
    lines = []
    for module in sorted(old):
        gone = {name for name in old[module] if any(name not in names.get(module, ())
                                                    for names in new)}
        if gone or any(module not in names for names in new):
            lines.append(' '.join([f'{module}:', *sorted(gone)]))
    (HERE / 'old_cupy_names.txt').write_text('\n'.join(lines) + '\n')


if __name__ == '__main__':
    main()
