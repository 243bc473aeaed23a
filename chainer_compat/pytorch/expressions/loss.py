"""Loss functions and accuracy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as N
from chainer.functions.loss.softmax_cross_entropy import SoftmaxCrossEntropy
from chainer.functions.loss.softmax_cross_entropy import (
    _SoftmaxCrossEntropyGrad_NoDoubleBackprop as CrossEntropyGrad,
)

from chainer_compat.pytorch.expressions.arrays import product
from chainer_compat.pytorch.tensors.arrays import Expression, check_floats
from chainer_compat.pytorch.unsupported import Unsupported


def mean_over_batch(f: Any, loss: Any) -> Any:
    """Return the mean over the batch for ``reduce='mean'``, or the loss itself for ``'no'``."""
    return loss.sum() / f.in_shapes[0][0] if f.reduce == 'mean' else loss


def softmax_cross_entropy(f: Any, x: Any, t: Any) -> Any:
    """``F.cross_entropy``, or ``log_softmax`` and ``gather`` with other options."""
    if f.soft_target:
        return _soft_targets(f, x, t)
    t = t.long()
    if f.reduce == 'mean' and f.normalize and f.class_weight is None:
        # The mean over no elements is 0 in Chainer, but NaN in PyTorch.
        count = (t != f.ignore_label).sum().clamp(min=1)
        return N.cross_entropy(x, t, ignore_index=f.ignore_label, reduction='sum') / count
    scores = torch.log_softmax(x, 1)
    if f.class_weight is not None:
        scores = scores * f.class_weight.reshape(
            [-1, *[1] * (len(f.in_shapes[0]) - 2)]).unsqueeze(0)
    valid = t != f.ignore_label
    chosen = torch.where(valid, t, torch.zeros_like(t)).unsqueeze(1)
    loss = -scores.gather(1, chosen).squeeze(1) * valid
    if f.reduce == 'no':
        return loss
    return loss.sum() / (valid.sum().clamp(min=1) if f.normalize else f.in_shapes[0][0])


def _soft_targets(f: Any, x: Any, t: Any) -> Any:
    scores, t = torch.log_softmax(x, 1), t.detach()
    loss = -(t * scores).sum(1)
    if f.soft_target_loss == 'kl-divergence':
        loss = (t * (torch.log(t + f.eps) - scores)).sum(1)
    if f.with_gradients:  # Chainer's gradient is softmax(x) - t, even if the sum of t is not 1
        like = torch.logsumexp(x, 1) - (t * x).sum(1)
        loss = like + (loss - like).detach()
    if f.reduce == 'no':
        return loss
    return loss.sum() / product(f.in_shapes[0][:1] + f.in_shapes[0][2:])


def sigmoid_cross_entropy(f: Any, x: Any, t: Any) -> Any:
    """``F.binary_cross_entropy_with_logits(x, t)``, without ignored elements."""
    valid = t != f.ignore_label
    loss = valid * N.binary_cross_entropy_with_logits(x, t.to(x.dtype), reduction='none')
    if f.reduce == 'no':
        return loss
    return loss.sum() / (valid.sum().clamp(min=1) if f.normalize else f.in_shapes[0][0])


def contrastive(f: Any, x0: Any, x1: Any, y: Any) -> Any:
    """``y * d ** 2 + (1 - y) * relu(margin - d) ** 2``, halved, with the distance ``d``."""
    squares = ((x0 - x1) ** 2).sum(1)
    distance = torch.relu(f.margin - torch.sqrt(squares))
    return mean_over_batch(f, (y * squares + (1 - y) * distance * distance) * .5)


def cross_covariance(f: Any, y: Any, z: Any) -> Any:
    """``c = (y - y.mean(0)).T @ (z - z.mean(0)) / n``; half the sum of its squares."""
    c = (y - y.mean(0)).t().matmul(z - z.mean(0)) / f.in_shapes[0][0]
    return c if f.reduce == 'no' else (c * c).sum() * .5


def decov(f: Any, h: Any) -> Any:
    """``c = (h - h.mean(0)).T @ (h - h.mean(0)) / n`` without its diagonal."""
    h = h - h.mean(0)
    c = h.t().matmul(h)
    c = (c - torch.diag(torch.diag(c))) / f.in_shapes[0][0]
    return c if f.reduce == 'no' else (c * c).sum() * .5


def ctc(f: Any, input_length: Any, label_length: Any, t: Any, xs: Any) -> Any:
    """``F.ctc_loss(log_softmax(xs, 2), ...)``."""
    loss = N.ctc_loss(torch.log_softmax(xs, 2), t.long(), input_length.long(),
                      label_length.long(), f.blank_symbol, 'none')
    return loss.mean() if f.reduce == 'mean' else loss


def hinge(f: Any, x: Any, t: Any) -> Any:
    """``relu(1 + x * sign)``, where the sign is -1 for the label."""
    sign = 1 - 2 * N.one_hot(t.long(), f.in_shapes[0][1]).to(x.dtype)
    loss = torch.relu(1 + x * sign)
    return mean_over_batch(f, loss if f.norm == 'L1' else loss ** 2)


def huber(f: Any, x0: Any, x1: Any) -> Any:
    """``F.huber_loss(x0, x1, reduction='none', delta=delta)``."""
    loss = N.huber_loss(x0, x1, reduction='none', delta=float(f.delta))
    return loss if f.reduce == 'no' else loss.sum(1)


def triplet(f: Any, anchor: Any, positive: Any, negative: Any) -> Any:
    """``relu(d_positive - d_negative + margin)`` with squared distances."""
    distance = ((anchor - positive) ** 2 - (anchor - negative) ** 2).sum(1)
    return mean_over_batch(f, torch.relu(distance + f.margin))


def accuracy(f: Any, y: Any, t: Any) -> Any:
    """``(y.argmax(1) == t).to(dtype).mean()``, without ignored elements."""
    right = y.argmax(1).reshape(f.in_shapes[1]) == t
    if f.ignore_label is None:
        return right.to(y.dtype).mean()
    valid = t != f.ignore_label
    return (right & valid).sum().to(y.dtype) / valid.sum().clamp(min=1)


def binary_accuracy(f: Any, y: Any, t: Any) -> Any:
    """``((y >= 0) == t).sum() / (t != -1).sum()``."""
    right = ((y >= 0).to(t.dtype) == t).sum()
    return right.to(y.dtype) / (t != f.ignore_label).sum().clamp(min=1)


def classification_summary(f: Any, y: Any, t: Any) -> Any:
    """Precision, recall, F-score and support, from ``one_hot`` of labels and predictions."""
    classes = f.call(torch.arange, t.max().item() + 1 if f.label_num is None else f.label_num)
    is_valid = (t != f.ignore_label).reshape(-1, 1)
    true = (t.reshape(-1, 1) == classes) & is_valid
    found = (y.argmax(1).reshape(-1, 1) == classes) & is_valid
    right, relevant, support = (each.sum(0) for each in (true & found, found, true))
    precision, recall = (right.double() / each.double() for each in (relevant, support))
    square = f.beta * f.beta
    fbeta = (1 + square) * precision * recall / (square * precision + recall)
    return precision, recall, fbeta, support


def r2_score(f: Any, pred: Any, true: Any) -> Any:
    """``1 - ((pred - true) ** 2).sum(0) / ((true - true.mean(0)) ** 2).sum(0)``."""
    total = ((true - true.mean(0)) ** 2).sum(0)
    is_zero = total == 0
    rest = ((pred - true) ** 2).sum(0) / torch.where(is_zero, torch.ones_like(total), total)
    score = torch.where(is_zero, torch.zeros_like(rest), 1 - rest)
    return score.mean() if f.multioutput == 'uniform_average' else score


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    'evaluation.accuracy.Accuracy': accuracy,
    'evaluation.binary_accuracy.BinaryAccuracy': binary_accuracy,
    'evaluation.classification_summary.ClassificationSummary': classification_summary,
    'evaluation.r2_score.R2_score': r2_score,
    'loss.absolute_error.AbsoluteError': lambda f, x, y: torch.abs(x - y),
    'loss.contrastive.Contrastive': contrastive,
    'loss.cross_covariance.CrossCovariance': cross_covariance,
    'loss.ctc.ConnectionistTemporalClassification': ctc,
    'loss.decov.DeCov': decov,
    'loss.hinge.Hinge': hinge,
    'loss.huber_loss.HuberLoss': huber,
    'loss.mean_absolute_error.MeanAbsoluteError': lambda f, x, y: torch.abs(x - y).mean(),
    'loss.mean_squared_error.MeanSquaredError': lambda f, x, y: ((x - y) ** 2).mean(),
    'loss.sigmoid_cross_entropy.SigmoidCrossEntropy': sigmoid_cross_entropy,
    'loss.softmax_cross_entropy.SoftmaxCrossEntropy': softmax_cross_entropy,
    'loss.squared_error.SquaredError': lambda f, x, y: (x - y) ** 2,
    'loss.triplet.Triplet': triplet,
}


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy with Chainer's gradient, which reads labels and softmax in ``backward``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, labels: torch.Tensor, f: SoftmaxCrossEntropy
                ) -> torch.Tensor:
        log_y = torch.log_softmax(x, 1)
        loss = N.nll_loss(log_y, labels.long(), reduction='sum',
                          ignore_index=f.ignore_label) * f._coeff
        f.y = log_y.exp_().numpy()
        ctx.gradient = CrossEntropyGrad(f.ignore_label, None, f.y, f._coeff, False)
        ctx.labels = labels.numpy()
        return loss

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gx, = ctx.gradient.forward_cpu((ctx.gradient.y, ctx.labels, gy.numpy()))
        return torch.from_numpy(gx), None, None


def run_softmax_cross_entropy(f: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """``F.nll_loss(log_softmax(x, 1), t)``, for labels with one axis."""
    if (f.class_weight is not None or x.ndim != 2 or t.ndim != 1 or len(t) != len(x)
            or not x.numel() or f.reduce != 'mean' or t.dtype.is_floating_point
            or not f.cache_score or type(f.ignore_label) is not int):
        raise Unsupported
    low, high = (each.item() for each in torch.aminmax(t))
    if high >= x.shape[1]:
        raise Unsupported
    count = len(t)
    if low < 0:
        valid = t[t != f.ignore_label]
        if (f.normalize and not len(valid)) or (len(valid) and valid.min() < 0):
            raise Unsupported
        if f.normalize:
            count = len(valid)
    elif 0 <= f.ignore_label < x.shape[1]:
        raise Unsupported
    f._coeff = 1. / count
    loss = _CrossEntropy.apply(x, t, f)
    if low < 0 and not loss.isfinite():  # NumPy multiplies ignored elements by 0
        raise Unsupported
    f.retain_inputs((0, 1))
    return loss


def run_squared_error(f: Any, x: torch.Tensor, y: torch.Tensor, reduction: str = 'none'
                      ) -> torch.Tensor:
    """``F.mse_loss(x, y)``."""
    _check_shapes(x, y)
    f.retain_inputs((0, 1))
    return N.mse_loss(x, y, reduction=reduction)


def run_absolute_error(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``torch.abs(x - y)``."""
    _check_shapes(x, y)
    difference = x - y
    if difference.detach().sum().isnan():  # PyTorch's gradient is 0 there
        raise Unsupported
    f.diff = difference.detach().numpy()
    return torch.abs(difference)


def run_huber(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``F.huber_loss(x, y, reduction='none', delta=delta)``."""
    _check_shapes(x, y)
    if type(f.delta) not in (int, float) or f.delta <= 0:
        raise Unsupported
    f.retain_inputs((0, 1))
    return huber(f, x, y)


def _check_shapes(x: torch.Tensor, y: torch.Tensor) -> None:
    check_floats(x, y)
    if x.shape != y.shape or not x.numel():
        raise Unsupported


RECORDED: dict[str, Expression] = {
    'loss.absolute_error.AbsoluteError': run_absolute_error,
    'loss.huber_loss.HuberLoss': run_huber,
    'loss.mean_absolute_error.MeanAbsoluteError':
        lambda f, x, y: run_absolute_error(f, x, y).mean(),
    'loss.mean_squared_error.MeanSquaredError':
        lambda f, x, y: run_squared_error(f, x, y, 'mean'),
    'loss.softmax_cross_entropy.SoftmaxCrossEntropy': run_softmax_cross_entropy,
    'loss.squared_error.SquaredError': run_squared_error,
}
