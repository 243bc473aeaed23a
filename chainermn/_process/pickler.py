"""Pickles functions that a script defines, together with the name of the script."""
from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import ClassVar

import cloudpickle

_reduce: Callable[[CodeType], tuple[Callable[..., CodeType], tuple[object, ...]]] = (
    cloudpickle.CloudPickler.dispatch_table[CodeType])


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[object, ...]]:
    create, arguments = _reduce(code)
    return _create_code, (code.co_filename, create, arguments)


def _create_code(file: str, create: Callable[..., CodeType],
                 arguments: tuple[object, ...]) -> CodeType:
    return create(*arguments).replace(co_filename=file)


class Pickler(cloudpickle.CloudPickler):
    """cloudpickle's pickler, but code objects keep their file name, which version 3.1.3 drops.

    Without it, tracebacks and call sites would not show lines of the user's script.
    """

    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code},
                                        cloudpickle.CloudPickler.dispatch_table)
