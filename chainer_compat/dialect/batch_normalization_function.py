"""The class ``BatchNormalizationFunction`` of Chainer 1 and 2, which custom links call."""

from typing import Any

import chainer


class BatchNormalizationFunction:
    """Normalizes with the batch statistics or with given statistics.

    Args:
        eps: Value added to the variance.
        mean: Moving average of the mean before a call; zeros by default. The array is not changed.
        var: Moving average of the variance before a call; zeros by default. The array is not
            changed.
        options: ``decay``, or ``train, decay, use_cudnn`` as in Chainer 1.
        keywords: The same options by name. ``train`` has no effect: callers that set it to false
            also pass statistics to the call.

    Attributes:
        running_mean: Moving average of the mean after a call.
        running_var: Moving average of the variance after a call.
    """

    def __init__(self, eps: float = 2e-5, mean: Any = None, var: Any = None, *options: Any,
                 **keywords: Any) -> None:
        if options and isinstance(options[0], bool):
            options = options[1:]
        self.eps = eps
        self.running_mean, self.running_var = mean, var
        self.decay: float = keywords.get('decay', options[0] if options else 0.9)

    def __call__(self, x: Any, gamma: Any, beta: Any, *statistics: Any) -> Any:
        """Return the normalized ``x``; ``statistics`` are a mean and a variance."""
        if statistics:
            return chainer.functions.fixed_batch_normalization(
                x, gamma, beta, *statistics, eps=self.eps)
        scale = chainer.as_array(gamma)
        xp = chainer.backend.get_array_module(scale)
        self.running_mean, self.running_var = (
            xp.zeros_like(scale) if average is None else xp.array(average)
            for average in (self.running_mean, self.running_var))
        return chainer.functions.batch_normalization(
            x, gamma, beta, eps=self.eps, running_mean=self.running_mean,
            running_var=self.running_var, decay=self.decay)
