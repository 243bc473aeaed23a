"""Access to the examples of datasets, for Chainer's patched iterators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def example(dataset: Any, index: Any) -> Any:
    """Return an example of a dataset.

    Raises:
        RuntimeError: If the dataset raises StopIteration, which would end the batch early.
    """
    try:
        return dataset[index]
    except StopIteration as error:
        raise RuntimeError(
            f'example {index} of the dataset ({type(dataset).__name__}) raised StopIteration, '
            'which would end the batch without the remaining examples. Catch it in get_example, or '
            'raise another exception.') from error


def checked_batch_size(iterator: Any, batch_size: Any) -> Any:
    """Return a batch size if it is valid.

    Raises:
        ValueError: If it is not a positive integer.
    """
    if isinstance(batch_size, (int, np.integer)) and batch_size > 0:
        return batch_size
    iterator.finalize = lambda: None  # nothing has been started
    raise ValueError(
        f'{type(iterator).__name__}: batch_size must be a positive integer, not {batch_size!r}. To '
        'divide a batch size by the number of ranks, use max(1, batch_size // comm.size).')


def no_examples() -> ValueError:
    """Return the error of an iterator that repeats an empty dataset."""
    return ValueError('the dataset of an iterator with repeat=True is empty, so there is no batch. '
                      'Check len(dataset) and, if there is an order_sampler, the order it returns.')


class Batch:
    """The examples that a thread loads, or the error that was raised.

    Args:
        dataset: The dataset.
        indexes: The indexes of the examples.
    """

    def __init__(self, dataset: Any, indexes: Sequence[Any]) -> None:
        self._examples: list[Any] = []
        self._error: Exception | None = None
        try:
            self._examples = [example(dataset, index) for index in indexes]
        except Exception as error:
            self._error = error

    def get(self) -> list[Any]:
        """Return the examples, or raise the error."""
        if self._error is not None:
            raise self._error
        return self._examples
