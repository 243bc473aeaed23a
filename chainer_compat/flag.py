"""The module ``chainer.flag`` of Chainer 1: the values of ``Variable.volatile``."""

from collections.abc import Iterable
from typing import Any

_VALUES = {'on': True, 'ON': True, True: True, 'off': False, 'OFF': False, False: False,
           'auto': None, 'AUTO': None, None: None}
_flags: dict[bool | None, 'Flag'] = {}


class Flag:
    """One of ``ON``, ``OFF`` and ``AUTO``, which are also equal to strings and booleans."""

    value: bool | None

    def __new__(cls, name: Any) -> 'Flag':
        """Return the flag of ``name``, of which there is one object per value."""
        if isinstance(name, Flag):
            return name
        value = _VALUES[name]
        if value not in _flags:
            _flags[value] = super().__new__(cls)
            _flags[value].value = value
        return _flags[value]

    def __bool__(self) -> bool:
        if self.value is None:
            raise ValueError('The flag AUTO is neither true nor false.')
        return self.value

    def __eq__(self, other: object) -> bool:
        return self is Flag(other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Flag, (self.value,)

    def __repr__(self) -> str:
        return {True: 'ON', False: 'OFF', None: 'AUTO'}[self.value]


ON, OFF, AUTO = Flag('on'), Flag('off'), Flag('auto')


def aggregate_flags(flags: Iterable[Flag]) -> Flag:
    """Return the flag of the outputs of a function whose inputs have ``flags``."""
    found = set(flags) - {AUTO}
    if len(found) > 1:
        raise ValueError('Inputs with volatile=ON and volatile=OFF cannot be mixed.')
    return found.pop() if found else AUTO
