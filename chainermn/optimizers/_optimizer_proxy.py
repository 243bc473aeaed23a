"""A proxy for an optimizer, and functions to compute gradients like ``Optimizer.update``."""
from __future__ import annotations

from collections.abc import Iterable

import chainer

from chainermn._timeline import activities
from chainermn._types import Optimizer, Parameter, Variable
from chainermn.optimizers._delegate import Delegate


class OptimizerProxy(Delegate, wraps='actual_optimizer'):
    """Base class of optimizers that combine the gradients of several ranks.

    All attributes that a subclass does not define or annotate belong to the actual optimizer.

    Args:
        actual_optimizer: The Chainer optimizer.

    Attributes:
        actual_optimizer: The Chainer optimizer.

    Example:
        >>> from chainermn.optimizers import proxy
        >>> class SummingOptimizer(proxy.OptimizerProxy):
        ...     def update(self, lossfun, *args):
        ...         proxy.compute_gradients(self.actual_optimizer, lossfun(*args))
        ...         for param in self.target.params():
        ...             param.grad = comm.allreduce(param.grad)
        ...         self.actual_optimizer.update()
        >>> summing = SummingOptimizer(chainer.optimizers.SGD(lr=0.1)).setup(model)
        >>> summing.update(model, *batch)
        >>> summing.lr, summing.t
        (0.1, 1)
    """

    actual_optimizer: Optimizer

    def __init__(self, actual_optimizer: Optimizer) -> None:
        super().__init__(actual_optimizer)
        activities.follow(self)


def compute_gradients(optimizer: Optimizer, loss: Variable) -> None:
    """Replace the gradients of all parameters of an optimizer with the gradients of a loss.

    Args:
        optimizer: The Chainer optimizer, set up with a model.
        loss: A scalar.

    Raises:
        ValueError: If the loss is not a scalar, so that backward fails.

    Example:
        >>> from chainermn.optimizers import proxy
        >>> sgd = chainer.optimizers.SGD().setup(model)
        >>> proxy.compute_gradients(sgd, model(*batch))
        >>> model.predictor.b.grad is None
        False
    """
    if getattr(optimizer, '_use_cleargrads', True):
        optimizer.target.cleargrads()
    else:
        optimizer.target.zerograds()
    # If the graph communicates, backward may start at a loss that is not a scalar.
    is_scalar = getattr(loss, 'size', 1) <= 1 or loss.grad is not None
    scale = getattr(optimizer, '_loss_scale', None)
    try:
        loss.backward(loss_scale=scale)
    except Exception as error:
        if is_scalar:
            raise
        raise ValueError(f'the loss must be a scalar, but has shape {loss.shape}. Reduce it, for '
                         'example with F.mean(loss).') from error
    for param in optimizer.target.params():
        param._loss_scale = scale  # parameters without a gradient may have an older scale


def keep_scale(optimizer: Optimizer) -> None:
    """Make the update rules divide all gradients by the loss scale.

    Backward sets the loss scale of a parameter only if this rank's loss used the parameter, but the
    mean gradients of all parameters are scaled.

    Args:
        optimizer: The Chainer optimizer.

    Example:
        >>> from chainermn.optimizers import proxy
        >>> sgd = chainer.optimizers.SGD().setup(model)
        >>> sgd.loss_scaling(scale=2)
        >>> model(*batch).backward(loss_scale=2)  # without compute_gradients()
        >>> proxy.keep_scale(sgd)
    """
    scale = getattr(optimizer, '_loss_scale', None)
    if scale is not None:
        for param in optimizer.target.params():
            param._loss_scale = scale


def by_first_path(named: Iterable[tuple[str, Parameter]]) -> dict[str, Parameter]:
    """Return parameters by path. A shared parameter appears only under its first path."""
    paths: dict[int, str] = {}
    return {path: param for path, param in named if paths.setdefault(id(param), path) == path}


def fill_missing_grad(param: Parameter) -> None:
    """Set the gradient of a parameter to zero if it has none.

    Args:
        param: The parameter.

    Example:
        >>> from chainermn.optimizers import proxy
        >>> model.cleargrads()
        >>> proxy.fill_missing_grad(model.predictor.b)
        >>> model.predictor.b.grad
        array([0., 0.], dtype=float32)
    """
    if param.grad is None:
        with chainer.using_device(param.device):
            param.grad = param.xp.zeros_like(param.array)
