"""Bugs in the examples of Chainer 7.8.1: existing programs that copied them run unchanged."""

import ast
import functools
import inspect
import sys
import textwrap
import warnings
from collections.abc import Sequence
from types import CodeType
from typing import Any

from chainer_compat.patching.registry import edit


@edit('chainer.utils.argument')
def option_compared_with_none() -> dict[str, str]:
    """All versions: VGG of ChainerMN's CIFAR example had an output layer for ``(None,)`` classes.

    The model compares the tuple returned by ``parse_kwargs`` with None. Now it receives the value.
    """
    return {'import inspect':
            'import inspect; from chainer_compat.fixes.example_programs import as_expected',
            'return tuple(values)': 'return as_expected(values, name_and_values)'}


def as_expected(values: list[Any], name_and_values: Sequence[tuple[str, Any]]) -> Any:
    """Return the form that the caller of ``parse_kwargs`` expects: a tuple, or the only value."""
    if len(values) != 1:
        return tuple(values)
    frame = sys._getframe(2)
    caller = frame.f_globals.get('__name__', '').partition('.')[0]
    if caller == 'chainer' or not _expects_value(frame.f_code, frame.f_lineno):
        return tuple(values)
    warnings.warn(f'parse_kwargs returns a tuple: write {name_and_values[0][0]}, = '
                  'parse_kwargs(...), with the comma.', stacklevel=3)
    return values[0]


@functools.cache
def _expects_value(code: CodeType, line: int) -> bool:
    """Return whether a function stores the result of a call in a name that it compares with None.

    Args:
        code: The code of the function.
        line: The line of the call.
    """
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent(''.join(lines)))
    except (OSError, SyntaxError):  # no source
        return False
    line -= max(first, 1) - 1
    names = {target.id for node in ast.walk(tree) if isinstance(node, ast.Assign)
             and isinstance(node.value, ast.Call)
             and node.lineno <= line <= (node.end_lineno or line)
             for target in node.targets if isinstance(target, ast.Name)}
    return any(
        isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id in names
        and isinstance(node.ops[0], ast.Is | ast.IsNot)
        and ast.unparse(node.comparators[0]) == 'None' for node in ast.walk(tree))


@edit('chainer.links.connection.convolution_2d', 'chainer.links.connection.linear')
def sizes_of_subclasses() -> dict[str, str]:
    """All versions: ParallelConvolution2D of ChainerMN's example read the wrong channels or failed.

    It sets the channels of the whole layer, but creates only one part. Since Chainer 6,
    L.Convolution2D itself sets ``in_channels``, and L.Linear sets ``in_size``.
    """
    return {f'self.{name} = {name}':
            f"self.{name} = ({name} if type(self).__module__.startswith('chainer.') else "
            f"vars(self).get('{name}', {name}))" for name in ('in_channels', 'in_size')}
