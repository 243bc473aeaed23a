"""Undoes what the first use of ``volatile`` changes in Chainer, for tests of other files."""

from collections.abc import Iterator

import chainer
import pytest

from chainer_compat.dialect import volatile


@pytest.fixture(autouse=True)
def functions_without_volatile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for cls, name in ((chainer.FunctionNode, 'apply'), (chainer.Variable, '__init__'),
                      (chainer.Variable, '__reduce__')):
        monkeypatch.setattr(cls, name, getattr(cls, name))
    yield
    volatile._hook_functions.cache_clear()
