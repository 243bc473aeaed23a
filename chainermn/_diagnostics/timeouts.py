"""The timeout of operations."""
from __future__ import annotations

import contextlib
import math

from chainermn._process import environment

VARIABLE = environment.TIMEOUT

#: The timeout per operation in seconds, unless the environment or the communicator sets one: long
#: enough for typical work of one rank while the others wait, such as preparing a dataset.
DEFAULT = 3600.


def parse(value: object, name: str = 'a timeout') -> float:
    """Return a timeout in seconds; 0 for no timeout.

    Raises:
        TypeError, ValueError: If the value is invalid.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f'{name} must be a number of seconds, not {value!r}')
    try:
        timeout = float(value)
    except ValueError:
        timeout = math.nan
    if not 0 <= timeout < math.inf:
        raise ValueError(f'{name} must be a number of seconds (0 disables it), not {value!r}')
    return timeout


def from_environment(name: str, default: float) -> float:
    """Return the seconds in an environment variable; the default if it is unset or invalid.

    :func:`check_environment` reports an invalid value.

    Args:
        name: The name of the variable.
        default: The value to return if the variable is unset or invalid.
    """
    with contextlib.suppress(ValueError):
        return parse(environment.text(name) or default, name)
    return default


def check_environment() -> None:
    """Check the environment variables that contain seconds.

    Raises:
        ValueError: If one of them is invalid.
    """
    for name in (VARIABLE, environment.STALL_WARNING):
        if value := environment.text(name):
            parse(value, name)


def text(timeout: float) -> str:
    """Return the part of a report that explains a timeout."""
    return f"the timeout is {timeout:g} s ({VARIABLE}, or the communicator's timeout)"
