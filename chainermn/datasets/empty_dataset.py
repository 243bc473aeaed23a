"""A dataset without content, for a rank whose model receives its input from another rank."""
from __future__ import annotations

from collections.abc import Sized


def create_empty_dataset(dataset: Sized) -> list[tuple[()]]:
    """Create a dataset without content that has the same length.

    In model parallelism, a model can start with :func:`chainermn.functions.recv` and end with
    :func:`chainermn.functions.send`, so that its ``forward`` has no arguments. With an empty
    dataset, its iterator has the same iterations and epochs as on the ranks that read the data.

    Args:
        dataset: The dataset that the first model reads; only its length is used.

    Returns:
        ``[(), (), ...]``, one empty tuple per example.

    Raises:
        TypeError: If the dataset has no length.

    Example:
        >>> chainermn.datasets.create_empty_dataset(['a.png', 'b.png'])
        [(), ()]
    """
    if not hasattr(dataset, '__len__'):
        raise TypeError('create_empty_dataset needs a dataset with a length, not '
                        f'{type(dataset).__name__}. On ranks without the dataset, pass range(n) '
                        'for n examples.')
    return [()] * len(dataset)
