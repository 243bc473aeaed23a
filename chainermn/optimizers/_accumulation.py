"""Gradients of several updates, accumulated until they are averaged over the ranks."""
from __future__ import annotations

import chainer
import numpy as np

from chainermn._gradients.loss_scale import without_scale
from chainermn._types import Array, Model, Object, Parameter, Serializer
from chainermn.optimizers._optimizer_proxy import by_first_path

#: Path in snapshots. Checkpoints treat arrays under 'chainermn' as belonging to one rank.
_FOLDER = 'chainermn', 'accumulation'


class Accumulation:
    """Accumulates the gradients of ``n`` updates and returns their mean.

    If an update does not use a parameter, the gradient of the parameter counts as zero. float16
    gradients are accumulated in float32 and rounded once. The loss scale may change between
    updates, so each gradient is divided by its loss scale, and the mean is multiplied by the loss
    scale of the last update.

    Args:
        n: Number of updates.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        #: Number of updates so far.
        self.count: int = 0
        self._sums: dict[int, Array] = {}  # by id of the parameter

    @property
    def is_last(self) -> bool:
        """Whether the next update is the last of the ``n`` updates."""
        return self.count + 1 >= self.n

    def completed(self, param: Parameter, grad: Array, scale: float | None) -> Array:
        """Return the mean that :meth:`add` will store if this is the last of the ``n`` updates.

        Args:
            param: A parameter.
            grad: Gradient of the parameter in this update. It is not changed.
            scale: The loss scale of this update.
        """
        n_updates = self.count + 1
        if n_updates == 1:
            return grad
        total = self._sums.get(id(param))
        grad = grad if scale is None else without_scale(grad, scale)
        if total is None:
            total = grad.astype(np.promote_types(grad.dtype, np.float32))
        else:
            total = total.copy()
            total += grad
        return _divided(total, n_updates, param.dtype, scale)

    def add(self, model: Model) -> bool:
        """Move the gradients of a model into the accumulation.

        Args:
            model: The model. After the last update, its gradients are the means.

        Returns:
            Whether this was the last of the ``n`` updates.
        """
        if self.n == 1 and not self.count:
            return True
        self.count += 1
        for param in model.params(include_uninit=False):
            grad = param.grad
            if grad is None:  # not used by the loss, or a shared parameter that was already added
                continue
            if (scale := _scale(param)) is not None:
                grad = without_scale(grad, scale)
            if id(param) in self._sums:
                self._sums[id(param)] += grad
            else:
                self._sums[id(param)] = grad.astype(np.promote_types(grad.dtype, np.float32))
            param.cleargrad()
        if self.count < self.n:
            return False
        self.give(model, self.count)
        return True

    def give(self, model: Model, divisor: int) -> None:
        """Move the accumulated gradients back into the model.

        Args:
            model: The model.
            divisor: Number by which the gradients are divided.
        """
        for param in model.params(include_uninit=False):
            total = self._sums.pop(id(param), None)
            if total is not None:
                param.grad = _divided(total, divisor, param.dtype, _scale(param))
        self.clear()

    def clear(self) -> None:
        """Drop the accumulated gradients."""
        self.count = 0
        self._sums.clear()

    def serialize(self, serializer: Serializer, model: Model) -> None:
        """Save or load the accumulated gradients of this rank.

        Args:
            serializer: A Chainer serializer or deserializer.
            model: The model.
        """
        is_loading = isinstance(serializer, chainer.Deserializer)
        if not is_loading and not self.count:
            return
        for name in _FOLDER:
            serializer = serializer[name]
        if is_loading:
            self.clear()
            self.count = int(loaded(serializer, 'count', 0))
        else:
            serializer('count', self.count)
        sums = serializer['sums']
        # Include uninitialized parameters, which Chainer loads after the optimizer.
        params = by_first_path(sorted(model.namedparams())) if self.count else {}
        for path, param in params.items():
            key = path.strip('/')
            if not is_loading:
                if id(param) in self._sums:
                    sums(key, self._sums[id(param)])
            elif (total := loaded(sums, key, None)) is not None:
                self._sums[id(param)] = param.device.send(total)


def loaded(serializer: Serializer, key: str, default: Object) -> Object:
    """Return a saved value, or ``default`` if the snapshot does not contain it."""
    try:
        return serializer(key, default)
    except KeyError:
        return default


def _scale(param: Parameter) -> float | None:
    return getattr(param, '_loss_scale', None)


def _divided(total: Array, divisor: int, dtype: np.dtype, scale: float | None) -> Array:
    """Divide a sum in place, multiply it by the loss scale, and round it once."""
    total *= total.dtype.type((scale or 1) / divisor)
    with np.errstate(over='ignore'):
        return total.astype(dtype, copy=False)
