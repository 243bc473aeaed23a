"""Write the table of reference/expressions.md: PyTorch expressions of Chainer's functions.

``python docs/expressions.py`` reads the source of ``chainer_compat/pytorch/expressions``. It shows
the body of short expressions, and the first line of the docstring of longer ones.
"""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / 'chainer_compat' / 'pytorch' / 'expressions'
PAGE = ROOT / 'docs' / 'reference' / 'expressions.md'

HEAD = """# PyTorch expressions of Chainer's functions

`chainer_compat.to_torch` replaces each function with the expression in its row. `f` is Chainer's
function object with its options, and `F` is `torch.nn.functional`. See [Moving a model to PyTorch
or ONNX](../conversion.md). During training on the CPU, functions in
[runs](../torch_kernels.md#runs-of-functions) use these expressions, or faster ones with the same
results.

`python docs/expressions.py` generates this page from `chainer_compat/pytorch/expressions`.
"""


def page():
    """Return the text of the page."""
    rows, without, options, in_numpy, in_runs = [], [], [], [], set()
    for path in sorted(FOLDER.glob('*.py')):
        tree = ast.parse(path.read_text('utf-8'))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        for node in tree.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Dict):
                continue
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if not isinstance(key, ast.Constant):
                    continue
                if node.target.id == 'NOT_EXPRESSIBLE':
                    without.append((short(key.value), value.value))
                elif node.target.id == 'EXPRESSIONS' and path.stem == 'numpy_functions':
                    in_numpy.append(key.value)
                elif node.target.id in ('RETAINED', 'RECORDED'):
                    in_runs.add(short(key.value))
                elif node.target.id == 'EXPRESSIONS':
                    rows.append((short(key.value), text(value, functions)))
                    options += [(short(key.value), reason)
                                for reason in missing(value, functions)]
            if path.stem == 'numpy_functions':
                equal = next(each for each in tree.body if isinstance(each, ast.Assign)).value
                in_numpy += [each.value for each in equal.elts]
    lines = [HEAD, '| function | expression | in runs |', '|---|---|---|']
    lines += [f'| `{name}` | {what} | {"yes" if name in in_runs else ""} |'
              for name, what in sorted(rows)]
    lines += ['', '## Functions without an expression', '',
              'Models that call these functions, or `chainer.grad`, cannot be converted:', '',
              '| function | reason |', '|---|---|']
    lines += [f'| `{name}` | {what} |' for name, what in sorted(without)]
    lines += ['', 'These options of functions cannot be converted:', '',
              '| function | option |', '|---|---|']
    lines += [f'| `{name}` | {what} |' for name, what in sorted(options)]
    lines += ['', "## NumPy's functions", '',
              'Models may call these functions and methods on inputs or `variable.array`, and',
              'draw random numbers with `random.normal`, `randn`, `standard_normal`, `uniform`,',
              '`rand`, `random_sample` or `gumbel`:',
              ', '.join(f'`{name}`' for name in sorted(set(in_numpy))
                        if not name.startswith('random.')) + '.']
    return '\n'.join(lines) + '\n'


def short(name):
    """Return the class without its module."""
    return name.rpartition('.')[2]


def text(value, functions):
    """Return an expression in Markdown."""
    if isinstance(value, ast.Lambda):
        return code(ast.unparse(value.body))
    if isinstance(value, ast.Call) and value.func.id == 'of':
        return code(ast.unparse(value.args[0]))
    function = functions[value.id if isinstance(value, ast.Name) else value.func.id]
    inner = [each for each in function.body if isinstance(each, ast.FunctionDef)]
    found = ast.get_docstring(inner[0] if inner and isinstance(value, ast.Call) else function)
    return re.sub('``', '`', found.split('\n')[0].removesuffix('.')).replace('|', '\\|')


def missing(value, functions):
    """Return the options for which an expression raises NotImplementedError."""
    nodes, found = [value], []
    for each in nodes:
        for node in ast.walk(each):
            if isinstance(node, ast.Raise) and node.exc.func.id == 'NotImplementedError':
                found.append(node.exc.args[0].value)
            elif isinstance(node, ast.Name) and functions.get(node.id, value) not in nodes:
                nodes.append(functions[node.id])
    return found


def code(source):
    """Return source code in Markdown."""
    return '`' + re.sub(r'\bN\.', 'F.', source).replace('|', '\\|') + '`'


if __name__ == '__main__':
    PAGE.write_text(page(), 'utf-8')
    sys.stdout.write(f'wrote {PAGE.relative_to(ROOT)}\n')
