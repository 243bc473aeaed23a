"""``import onnx_chainer``: an error that advises ``to_onnx`` if the import would fail."""

from __future__ import annotations

import importlib.util


def check() -> None:
    """Raise an error if the installed onnx does not have a module that ``onnx_chainer`` imports.

    Raises:
        ImportError: If onnx has no ``onnx.mapping``, which version 1.18 removed.
    """
    if importlib.util.find_spec('onnx') is None:
        return  # onnx_chainer raises its own error
    if importlib.util.find_spec('onnx.mapping') is None:
        raise ImportError('onnx_chainer does not work with the installed version of onnx, which '
                          'has no onnx.mapping. Use chainer_compat.to_onnx(model, path, inputs).')
