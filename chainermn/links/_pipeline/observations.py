"""Values that are reported in micro-batches. Their means are reported once per batch."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import chainer

from chainermn._types import Object


class Observations:
    """Weighted sums of the values that are passed to ``chainer.report``, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, Object] = {}
        self._weights: dict[str, float] = {}

    @contextlib.contextmanager
    def of(self, weight: float) -> Iterator[None]:
        """Add the values that are reported within the context instead of reporting them."""
        if not chainer.reporter._get_reporters():
            yield
            return
        observation: dict[str, Object] = {}
        with chainer.reporter.report_scope(observation):
            yield
        for name, value in observation.items():
            if isinstance(value, chainer.Variable):
                value = value.array
            self._sums[name] = self._sums.get(name, 0) + value * weight
            self._weights[name] = self._weights.get(name, 0) + weight

    def means(self) -> dict[str, float]:
        """Return the means as numbers, which can be sent to other ranks."""
        return {name: float(total / self._weights[name]) for name, total in self._sums.items()
                if self._weights[name]}


def report(of_ranks: Sequence[Mapping[str, float]]) -> None:
    """Report the means of ranks. Later values replace earlier values with the same name."""
    if reporters := chainer.reporter._get_reporters():
        for each in of_ranks:
            for name, value in each.items():
                reporters[-1].observation[name] = value
