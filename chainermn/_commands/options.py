"""Types of options that several commands have."""
from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a function that converts text to an integer that is large enough."""
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f'must be an integer of at least {minimum}, not {text}')
        return int(text)

    return number
