"""Names that Python removed: ``CHAINER_COMPAT_NAMES=all`` restores them for existing programs."""

from __future__ import annotations

import base64
import collections
import fractions
import importlib
import inspect
import math
import sys
import time
from collections import abc
from typing import Any, NamedTuple


class ArgSpec(NamedTuple):
    """Result of ``inspect.getargspec``."""

    args: list[str]
    varargs: str | None
    keywords: str | None
    defaults: tuple[Any, ...] | None


def getargspec(func: Any) -> ArgSpec:
    """Return the arguments of a function that has no keyword-only arguments or annotations."""
    full = inspect.getfullargspec(inspect.unwrap(func))
    if full.kwonlyargs or full.annotations:
        raise ValueError(f'{func!r} has annotations or keyword-only arguments: '
                         'use inspect.signature or inspect.getfullargspec.')
    return ArgSpec(full.args, full.varargs, full.varkw, full.defaults)


#: By module: the names, and their current equivalents.
NAMES: dict[Any, dict[str, Any]] = {
    base64: {'decodestring': base64.decodebytes, 'encodestring': base64.encodebytes},
    collections: {name: getattr(abc, name) for name in abc.__all__ if name != 'Buffer'},
    fractions: {'gcd': math.gcd},
    inspect: {'ArgSpec': ArgSpec, 'getargspec': getargspec},
    time: {'clock': time.process_time},
}


def restore() -> None:
    """Define the names that this version of Python does not have."""
    for module, names in NAMES.items():
        for name, value in names.items():
            if not hasattr(module, name):
                setattr(module, name, value)
    if sys.version_info >= (3, 12):
        sys.modules.setdefault('imp', importlib.import_module('chainer_compat.names.old_imp'))
