"""docs/troubleshooting.md names messages that the code has."""

import ast
import functools
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
        elif cells[1].strip() == 'message':
            ours = True
        elif ours:
            yield from re.findall('`(.*?)`', cells[1])


@functools.cache
def code():
    """The strings in the code; values of f-strings are replaced by a character."""
    return '\n'.join(texts())


def texts():
    for package in ('chainermn', 'chainer_compat'):
        for path in ROOT.joinpath(package).rglob('*.py'):
            for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
                if isinstance(node, ast.JoinedStr):
                    yield ''.join(value.value if isinstance(value, ast.Constant) else '\0'
                                  for value in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


MESSAGES = [*messages()]


def test_there_are_messages():
    assert len(MESSAGES) > 50
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize('message', MESSAGES)
def test_the_code_has_the_message(message):
    parts = [part.strip() for part in message.split('...') if part.strip()]
    assert max(map(len, parts)) > 6
    missing = [part for part in parts if part not in code()]
    assert not missing
