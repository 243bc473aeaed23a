"""All exceptions that the package defines have one base class."""
import ast
import builtins
import pathlib
import pickle
import re

import pytest

import chainermn

pytestmark = pytest.mark.mpi_skip

PUBLIC = [value for value in vars(chainermn).values()
          if isinstance(value, type) and issubclass(value, Exception)]


def test_there_are_some():
    assert {chainermn.CollectiveMismatchError, chainermn.DataSizeError} < {*PUBLIC}


@pytest.mark.parametrize('exception', PUBLIC, ids=lambda exception: exception.__name__)
def test_base_class(exception):
    assert issubclass(exception, chainermn.ChainerMNError)


def test_base_class_of_private_exceptions():
    """Except for ``_KeyError``, which another rank raised, and ``_CalledWith``, no error."""
    root = pathlib.Path(chainermn.__file__).parent
    without = []
    for path in root.rglob('*.py'):
        text = path.read_text(encoding='utf-8')
        if not re.search(r'^ *class .*(Error|Exception|Interrupt|Exit)', text, re.M):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base) for base in node.bases}
                builtin = {getattr(builtins, base, None) for base in bases} - {None}
                if any(issubclass(base, BaseException) for base in builtin) and (
                        'ChainerMNError' not in bases):
                    without.append(node.name)
    assert sorted(without) == ['ChainerMNError', '_CalledWith', '_KeyError']


def test_old_scripts_still_catch_them():
    assert issubclass(chainermn.CollectiveMismatchError, ValueError)
    assert issubclass(chainermn.DataSizeError, RuntimeError)


def test_they_can_be_pickled():
    error = pickle.loads(pickle.dumps(chainermn.CollectiveMismatchError('text')))
    assert type(error) is chainermn.CollectiveMismatchError and str(error) == 'text'
