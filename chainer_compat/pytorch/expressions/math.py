"""Arithmetic, elementary functions, sums and linear algebra."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from chainer_compat.pytorch.expressions.arrays import dtype_of
from chainer_compat.pytorch.expressions.running import NOTHING, XX, Called, Retained, X, Y
from chainer_compat.pytorch.tensors.arrays import Expression, check_floats
from chainer_compat.pytorch.tensors.gpu_arrays import DTYPES
from chainer_compat.pytorch.tensors.memory_format import with_ordered_gradient
from chainer_compat.pytorch.unsupported import Unsupported


def all_axes(f: Any) -> Any:
    """Return the axes of a reduction; ``None`` means all axes."""
    return tuple(range(len(f.in_shapes[0]))) if f.axis is None else f.axis


def matmul(f: Any, a: Any, b: Any) -> Any:
    """``torch.matmul(a, b)``, with matrices transposed as requested."""
    transa, transb = f.transa, f.transb
    shapes = f.in_shapes
    if getattr(f, 'transc', False):
        transa, transb, a, b, shapes = not transb, not transa, b, a, shapes[::-1]
    if transa and len(shapes[0]) > 1:
        a = a.transpose(-1, -2)
    if transb and len(shapes[1]) > 1:
        b = b.transpose(-1, -2)
    return torch.matmul(a, b)


def batch_matmul(f: Any, a: Any, b: Any) -> Any:
    """``torch.matmul(a, b)`` of batches of matrices; vectors are columns."""
    a, b = (x.unsqueeze(2) if len(shape) == 2 else x
            for x, shape in zip((a, b), f.in_shapes, strict=True))
    return torch.matmul(a.transpose(1, 2) if f.transa else a, b.transpose(1, 2) if f.transb else b)


def tensordot(f: Any, a: Any, b: Any) -> Any:
    """``torch.tensordot(a, b, axes)``."""
    y = torch.tensordot(a, b, ([int(i) for i in f.a_axes[1]], [int(i) for i in f.b_axes[0]]))
    order = [int(i) for i in (*f.c_axes[0], *f.c_axes[1])]
    return y.permute([order.index(i) for i in range(len(order))]) if order else y


def einsum(f: Any, *xs: Any) -> Any:
    """``torch.einsum(subscripts, *xs)``."""
    return torch.einsum(f'{f.in_subs}->{f.out_sub}'.replace('@', '...'), *xs)


def sparse_matmul(f: Any, values: Any, dense: Any) -> Any:
    """``torch.matmul`` of the dense matrix and the sparse one, made dense by ``index_put``."""
    if len(f.in_shapes[0]) != 1:
        raise NotImplementedError('batches of sparse matrices')
    rows, columns = f.sp_row.long(), f.sp_col.long()
    zeros = f.constant(np.zeros(f.sp_shape, f.in_dtypes[0]))
    sparse = zeros.index_put((rows, columns), values, accumulate=True)
    if f.in_dtypes[0] != f.in_dtypes[1]:
        sparse, dense = sparse.to(dtype_of(f.dtype)), dense.to(dtype_of(f.dtype))
    y = torch.matmul(sparse.t() if f.transa else sparse, dense.t() if f.transb else dense)
    return y.t() if f.transc else y


def prod(f: Any, x: Any) -> Any:
    """``torch.prod(x, axis)``, axis by axis."""
    axes = all_axes(f)
    for axis in sorted((axis % len(f.in_shapes[0]) for axis in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=bool(f.keepdims))
    return x


def cumulated(function: Any) -> Any:
    """Return the expression of ``F.cumsum`` or ``F.cumprod``."""
    def expression(f: Any, x: Any) -> Any:
        """``torch.cumsum(x, axis)``, or ``cumprod``; of the flattened array if there is no axis."""
        return function(x.reshape(-1), 0) if f.axis is None else function(x, f.axis)

    return expression


def fourier(f: Any, real: Any, imag: Any) -> Any:
    """``torch.fft.fft(torch.complex(real, imag))``."""
    y = getattr(torch.fft, f._method)(torch.complex(real, imag))
    return y.real, y.imag


def polygamma(f: Any, n: Any, x: Any) -> Any:
    """``torch.polygamma(n, x)``, if all elements of ``n`` are equal."""
    orders = f.known(0)
    if orders is None or orders.min() != orders.max():
        raise NotImplementedError('several orders')
    return torch.polygamma(int(orders.flat[0]), x).expand(f.out_shapes[0])


def of(function: Any) -> Any:
    """Return the expression of a function with the same arguments in both libraries."""
    def expression(f: Any, *xs: Any) -> Any:
        return function(*xs)

    expression.__doc__ = f'``torch.{function.__name__.removeprefix("special_")}``.'
    return expression


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    'math.arctanh.Arctanh': of(torch.atanh),
    'math.average.Mean': lambda f, x: x.mean(all_axes(f), keepdim=f.keepdims),
    'math.basic_math.Absolute': of(torch.abs),
    'math.basic_math.Add': lambda f, x, y: x + y,
    'math.basic_math.AddConstant': lambda f, x: x + f.value,
    'math.basic_math.Div': lambda f, x, y: x / y,
    'math.basic_math.DivFromConstant': lambda f, x: f.value / x,
    'math.basic_math.Mul': lambda f, x, y: x * y,
    'math.basic_math.MulConstant': lambda f, x: x * f.value,
    'math.basic_math.MultiAdd': lambda f, *xs: functools.reduce(operator.add, xs),
    'math.basic_math.Neg': lambda f, x: -x,
    'math.basic_math.PowConstVar': lambda f, x: f.value ** x,
    'math.basic_math.PowVarConst': lambda f, x: x ** f.value,
    'math.basic_math.PowVarVar': lambda f, x, y: x ** y,
    'math.basic_math.Sub': lambda f, x, y: x - y,
    'math.basic_math.SubFromConstant': lambda f, x: f.value - x,
    'math.batch_l2_norm_squared.BatchL2NormSquared': lambda f, x: (x * x).flatten(1).sum(1),
    'math.cholesky.Cholesky': of(torch.linalg.cholesky),
    'math.clip.Clip': lambda f, x: torch.clamp(x, f.x_min, f.x_max),
    'math.cumprod.Cumprod': cumulated(torch.cumprod),
    'math.cumsum.Cumsum': cumulated(torch.cumsum),
    'math.det.BatchDet': of(torch.linalg.det),
    'math.digamma.DiGamma': of(torch.digamma),
    'math.einsum.EinSum': einsum,
    'math.erf.Erf': of(torch.erf),
    'math.erfc.Erfc': of(torch.erfc),
    'math.erfcinv.ErfcInv': lambda f, x: torch.erfinv(1 - x),
    'math.erfcx.Erfcx': of(torch.special.erfcx),
    'math.erfinv.ErfInv': of(torch.erfinv),
    'math.exponential.Exp': of(torch.exp),
    'math.exponential.Log': of(torch.log),
    'math.exponential.Log10': of(torch.log10),
    'math.exponential.Log2': of(torch.log2),
    'math.exponential_m1.Expm1': of(torch.expm1),
    'math.fft.FFT': fourier,
    'math.fmod.Fmod': of(torch.fmod),
    'math.hyperbolic.Cosh': of(torch.cosh),
    'math.hyperbolic.Sinh': of(torch.sinh),
    'math.inv.BatchInv': of(torch.linalg.inv),
    'math.inv.Inv': of(torch.linalg.inv),
    'math.lgamma.LGamma': of(torch.lgamma),
    'math.linear_interpolate.LinearInterpolate': lambda f, p, x, y: p * x + (1 - p) * y,
    'math.log_ndtr.LogNdtr': of(torch.special.log_ndtr),
    'math.logarithm_1p.Log1p': of(torch.log1p),
    'math.logsumexp.LogSumExp': lambda f, x: torch.logsumexp(x, all_axes(f)),
    'math.matmul.BatchMatMul': batch_matmul,
    'math.matmul.MatMul': matmul,
    'math.ndtr.Ndtr': of(torch.special.ndtr),
    'math.ndtri.Ndtri': of(torch.special.ndtri),
    'math.polygamma.PolyGamma': polygamma,
    'math.prod.Prod': prod,
    'math.sparse_matmul.CooMatMul': sparse_matmul,
    'math.sqrt.RsqrtGPU': of(torch.rsqrt),
    'math.sqrt.Sqrt': of(torch.sqrt),
    'math.square.Square': of(torch.square),
    'math.sum.Sum': lambda f, x: x.sum(all_axes(f), keepdim=bool(f.keepdims)),
    'math.tensordot.TensorDot': tensordot,
    'math.trigonometric.Arccos': of(torch.acos),
    'math.trigonometric.Arcsin': of(torch.asin),
    'math.trigonometric.Arctan': of(torch.atan),
    'math.trigonometric.Arctan2': of(torch.atan2),
    'math.trigonometric.Cos': of(torch.cos),
    'math.trigonometric.Sin': of(torch.sin),
    'math.trigonometric.Tan': of(torch.tan),
    'math.zeta.Zeta': lambda f, q: torch.special.zeta(f._x, q),
}


def run_add(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x + y``."""
    check_floats(x, y)
    return x + y


def run_sub(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x - y``."""
    check_floats(x, y)
    return x - y


def run_mul(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x * y``."""
    check_floats(x, y)
    f.retain_inputs((0, 1))
    return x * y


def with_number(expression: Expression, inputs: tuple[int, ...] = ()) -> Expression:
    """Return the expression of a function whose option ``value`` is a number."""
    def run(f: Any, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        check_floats(x)
        if not isinstance(f.value, int | float | np.floating | np.integer):
            raise Unsupported
        if inputs:
            f.retain_inputs(inputs)
        return expression(f, x)

    return run


def run_power(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``x ** value``."""
    if not f.value:  # at 0, the gradient is NaN in Chainer
        raise Unsupported
    return x ** float(f.value)


def run_absolute(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``torch.abs(x)``."""
    check_floats(x)
    y = torch.abs(x)
    if y.detach().sum().isnan():  # PyTorch's gradient is 0 there
        raise Unsupported
    f.retain_inputs((0,))
    return y


def run_divide(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``value / x``."""
    if abs(f.value) > torch.finfo(x.dtype).max:
        raise Unsupported
    return torch.scalar_tensor(float(f.value), dtype=x.dtype) / x


def run_interpolate(f: Any, p: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``torch.lerp(y, x, p)``."""
    check_floats(p, x, y)
    if not p.shape == x.shape == y.shape:
        raise Unsupported
    f.retain_inputs((0, 1, 2))
    return torch.lerp(y, x, p)


def run_sum(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``torch.sum(x, axis)``."""
    return torch.sum(with_ordered_gradient(x), _axes_of(f, x), keepdim=bool(f.keepdims))


def run_mean(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``torch.mean(x, axis)``."""
    if not x.numel():
        raise Unsupported
    y = torch.mean(with_ordered_gradient(x), _axes_of(f, x), keepdim=bool(f.keepdims))
    f.multiplier = y.numel() / x.numel()
    return y


def _axes_of(f: Any, x: torch.Tensor) -> tuple[int, ...]:
    axes = tuple(range(x.ndim)) if f.axis is None else f.axis
    if not axes and x.ndim:  # PyTorch would sum all elements
        raise Unsupported
    return axes


def run_matmul(f: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``torch.matmul(a, b)``, with matrices transposed as requested."""
    check_floats(a, b)
    if (f.dtype is not None and f.dtype != DTYPES[a.dtype]) or not a.numel() or not b.numel():
        raise Unsupported
    f.retain_inputs((0, 1))
    return matmul(Called(f, (a, b)), a, b)


RETAINED: dict[str, Retained] = {
    'math.basic_math.Div': XX,
    'math.basic_math.Neg': NOTHING,
    'math.exponential.Exp': Y,
    'math.exponential.Log': X,
    'math.logarithm_1p.Log1p': X,
    'math.sqrt.Sqrt': Y,
    'math.square.Square': X,
}

RECORDED: dict[str, Expression] = {
    'math.average.Mean': run_mean,
    'math.basic_math.Add': run_add,
    'math.basic_math.Absolute': run_absolute,
    'math.basic_math.AddConstant': with_number(lambda f, x: x + float(f.value)),
    'math.basic_math.DivFromConstant': with_number(run_divide, (0,)),
    'math.basic_math.Mul': run_mul,
    'math.basic_math.MulConstant': with_number(lambda f, x: x * float(f.value)),
    'math.basic_math.PowVarConst': with_number(run_power, (0,)),
    'math.basic_math.Sub': run_sub,
    'math.basic_math.SubFromConstant': with_number(lambda f, x: float(f.value) - x),
    'math.linear_interpolate.LinearInterpolate': run_interpolate,
    'math.matmul.MatMul': run_matmul,
    'math.sum.Sum': run_sum,
}
