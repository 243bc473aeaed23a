"""The SciPy modules that Chainer uses, imported on first use."""

import importlib
from typing import Any


class _LazyModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


class _SciPy:
    linalg = _LazyModule('scipy.linalg')


io, sparse, special = map(_LazyModule, ['scipy.io', 'scipy.sparse', 'scipy.special'])
scipy = _SciPy()
