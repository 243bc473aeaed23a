"""All messages in docs/troubleshooting.md exist in the code."""

import ast
import pathlib
import re

import pytest

pytestmark = pytest.mark.mpi_skip

ROOT = pathlib.Path(__file__).parents[2]


def messages():
    """The messages in the first column of tables of our messages, with `...` for their values."""
    ours = False
    for line in ROOT.joinpath('docs/troubleshooting.md').read_text(encoding='utf-8').splitlines():
        cells = line.split('|')
        if not line.startswith('|'):
            ours = False
        elif cells[1].strip() in ('message', 'message of ChainerMN'):
            ours = True
        elif ours:
            yield from re.findall('`(.*?)`', cells[1])


def texts():
    """The strings in the code; values of f-strings are replaced by a character."""
    for package in ('chainermn', 'chainer_compat'):
        for path in ROOT.joinpath(package).rglob('*.py'):
            for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
                if isinstance(node, ast.JoinedStr):
                    yield ''.join(value.value if isinstance(value, ast.Constant) else '\0'
                                  for value in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


@pytest.mark.slow
def test_the_code_has_the_messages():
    said = [*messages()]
    assert len(said) == len({*said}) > 50
    code = '\n'.join(texts())
    for message in said:
        parts = [part.strip() for part in message.split('...') if part.strip()]
        assert max(map(len, parts)) > 6, message
        assert not [part for part in parts if part not in code], message
