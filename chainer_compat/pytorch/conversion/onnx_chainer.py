"""``import onnx_chainer``: says what replaces it, where it cannot be imported."""

from __future__ import annotations

import importlib.util


def check() -> None:
    """Raise an error if the installed onnx lacks what ``onnx_chainer`` imports.

    Raises:
        ImportError: If onnx has no ``onnx.mapping``, which version 1.18 removed.
    """
    if importlib.util.find_spec('onnx') is None:
        return  # onnx_chainer has its own error
    if importlib.util.find_spec('onnx.mapping') is None:
        raise ImportError('onnx_chainer does not work with the installed version of onnx, which '
                          'has no onnx.mapping. Use chainer_compat.to_onnx(model, path, inputs).')
