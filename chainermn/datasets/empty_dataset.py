"""A data set without content, for a rank whose model gets its input from another rank."""
from __future__ import annotations

from typing import Any


def create_empty_dataset(dataset: Any) -> list[tuple[()]]:
    """Makes a data set that is as long as ``dataset`` and holds nothing.

    In model parallelism a model may begin with :func:`chainermn.functions.recv` and end with
    :func:`chainermn.functions.send`: its ``forward`` takes no arguments. An iterator over an empty
    data set calls it so, as often and in epochs as long as on the ranks that read the data.

    Args:
        dataset: The data set that the first model reads; only its length matters.

    Returns:
        ``[(), (), ...]``, one empty tuple for each example.
    """
    return [()] * len(dataset)
