"""Conversion of Chainer models to PyTorch modules and ONNX files.

``tracing`` runs a model and records its functions and their ``references`` to earlier ones;
``tracked_array`` follows arrays through NumPy. ``expressions`` has one entry per Chainer
function, ``module`` builds a ``torch.fx`` graph from them, and ``batch_size`` generalizes two runs
to any batch size. ``comparison`` compares the result with Chainer. ``weights`` copies weights back.
``onnx_file``, ``snapshots`` and ``command`` write files.
"""
