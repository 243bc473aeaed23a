"""The gradient of an embedding."""

from __future__ import annotations

import numpy as np
import torch
from chainer.functions.connection.embed_id import EmbedIDGrad

from chainer_compat.pytorch.tensors.arrays import array, tensor
from chainer_compat.pytorch.unsupported import Unsupported

NO_LABEL = -1  # PyTorch's value if no row is ignored


def gradient(f: EmbedIDGrad, inputs: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray]:
    """Return the gradient of the embedding matrix: sums of rows of ``gy``."""
    x, gy = inputs
    # There is a separate kernel for GPUs.
    if not isinstance(x, np.ndarray) or x.dtype.kind != 'i':
        raise Unsupported
    ignored = NO_LABEL if f.ignore_label is None else f.ignore_label
    # Other negative indexes count from the end.
    if ((x < 0) & (x != f.ignore_label)).any():
        raise Unsupported
    rows = tensor(gy)
    f.retain_inputs((0,))
    f._gy_shape = gy.shape
    return array(torch.ops.aten.embedding_dense_backward(
        rows, torch.from_numpy(x.astype(np.int64, order='C')), f.w_shape[0], ignored, False)),
