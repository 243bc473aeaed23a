"""Option types that several commands use."""
from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a function that converts text to an integer and rejects integers below ``minimum``.

    Args:
        minimum: The minimum, 0 or 1.
    """
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f'must be a {"positive" if minimum else "non-negative"} integer, not {text}')
        return int(text)

    return number
