"""Reads the hosts file and assigns ranks to hosts."""
from __future__ import annotations

import re
from collections.abc import Mapping

_LINE = re.compile(r'(?P<name>[^\s:=,-][^\s:=,]*)(?:(?::|\s+slots\s*=\s*)(?P<slots>[0-9]+))?')
_MAX_SHOWN = 8  # hosts


def read(path: str) -> dict[str, int]:
    """Return the number of slots of each host in a file.

    A line is ``host``, ``host:slots`` or ``host slots=N``; a host without a number has one slot.
    The rest of a line after ``#`` is ignored.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is not in UTF-8, if a line has the wrong format, or if a host has no
            slots or is listed twice.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(_text(path).split('\n'), 1):
        text = line.partition('#')[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None or not found['name'].isprintable() or (
                found['slots'] and not int(found['slots'])):
            raise ValueError(f'{path}, line {number}: must be "host", "host:slots" or '
                             f'"host slots=N" with at least one slot, not "{repr(text)[1:-1]}"')
        if found['name'] in slots:
            raise ValueError(f'{path}, line {number}: {found["name"]} is already listed; write one '
                             'line with all its slots')
        slots[found['name']] = int(found['slots'] or 1)
    return slots


def _text(path: str) -> str:
    try:
        with open(path, encoding='utf-8-sig') as file:  # editors on Windows add a byte order mark
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f'{path} is not a UTF-8 text file: byte {error.start} is '
                         f'0x{error.object[error.start]:02x}. Save it as UTF-8.') from None


def assign(slots: Mapping[str, int], n: int) -> dict[str, int]:
    """Assign up to ``n`` ranks, filling the hosts in order; return the number of ranks on each.

    Args:
        slots: The number of slots of each host.
        n: The maximum number of ranks.
    """
    ranks = {}
    for host, most in slots.items():
        if here := min(most, n):
            ranks[host] = here
            n -= here
    return ranks


def text(ranks: Mapping[str, int]) -> str:
    """Return a text such as ``node0:2, node1:2``, shortened if there are many hosts."""
    shown = [f'{host}:{n}' for host, n in ranks.items()]
    if len(shown) > _MAX_SHOWN:
        shown[_MAX_SHOWN - 1:] = [f'and {len(shown) - _MAX_SHOWN + 1} more hosts']
    return ', '.join(shown)
