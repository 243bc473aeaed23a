"""A data set without content, for a rank whose model receives its input from another rank."""
from __future__ import annotations

from collections.abc import Sized


def create_empty_dataset(dataset: Sized) -> list[tuple[()]]:
    """Create a data set of the same length without content.

    In model parallelism, a model can start with :func:`chainermn.functions.recv` and end with
    :func:`chainermn.functions.send`, so that its ``forward`` has no arguments. With an empty data
    set, its iterator has the same iterations and epochs as on the ranks that read the data.

    Args:
        dataset: The data set that the first model reads; only its length is used.

    Returns:
        ``[(), (), ...]``, one empty tuple per example.

    Raises:
        TypeError: If the data set has no length.

    Example:
        >>> chainermn.datasets.create_empty_dataset(['a.png', 'b.png'])
        [(), ()]
    """
    if not hasattr(dataset, '__len__'):
        raise TypeError('create_empty_dataset needs a data set with a length, not '
                        f'{type(dataset).__name__}. On ranks without the data set, pass range(n) '
                        'for n examples.')
    return [()] * len(dataset)
