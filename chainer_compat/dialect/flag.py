"""The module ``chainer.flag`` of Chainer 1: the values of ``Variable.volatile``."""

import enum
from collections.abc import Iterable
from typing import Any


class Flag(enum.Enum):
    """``ON``, ``OFF`` or ``AUTO``; compares equal to the strings and booleans that select it."""

    ON = True
    OFF = False
    AUTO = None

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return cls.__members__.get(str(value).upper())

    def __bool__(self) -> bool:
        if self is AUTO:
            raise ValueError('The flag AUTO is neither true nor false. Compare it with chainer.ON '
                             'or chainer.OFF.')
        return self is ON

    def __eq__(self, other: object) -> bool:
        return self is Flag(other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__


ON, OFF, AUTO = Flag


def aggregate_flags(flags: Iterable[Flag]) -> Flag:
    """Return the flag of a function's outputs from the ``flags`` of its inputs."""
    found = {*flags} - {AUTO}
    if len(found) > 1:
        raise ValueError('Inputs with volatile=ON and volatile=OFF cannot be mixed. Use the same '
                         'flag for all inputs of a function.')
    return found.pop() if found else AUTO
