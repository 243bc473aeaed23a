"""Examples of data sets, as Chainer's patched iterators get them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def example(dataset: Any, index: Any) -> Any:
    """Return an example.

    Raises:
        RuntimeError: If the data set raises StopIteration, which would end the batch early.
    """
    try:
        return dataset[index]
    except StopIteration as error:
        raise RuntimeError(
            f'example {index} of the data set ({type(dataset).__name__}) raised StopIteration, '
            'which would end the batch without the remaining examples. Catch it in get_example, or '
            'raise another exception.') from error


class Batch:
    """Examples that a thread gets, or its error.

    Args:
        dataset: The data set.
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
