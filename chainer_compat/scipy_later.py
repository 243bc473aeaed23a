"""The modules of SciPy that Chainer uses; each is imported when it is first used."""

import importlib
from typing import Any


class _Later:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


class _SciPy:
    linalg = _Later('scipy.linalg')


io, sparse, special = map(_Later, ['scipy.io', 'scipy.sparse', 'scipy.special'])
scipy = _SciPy()
