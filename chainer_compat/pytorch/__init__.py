"""PyTorch as a backend of Chainer, and export to PyTorch.

On the CPU, Chainer computes with NumPy, which has no convolutions. On GPUs, it computes without
cuDNN, because CuPy 14 does not support it. If PyTorch is installed, PyTorch computes instead.
Scripts do not change: arrays stay NumPy or CuPy arrays, which share their memory with tensors.

``chainer.config.use_torch`` selects the library that computes each call:

- ``'auto'`` (default): PyTorch, if it is installed, on the CPU and on GPUs that it can use, unless
  CuPy has cuDNN;
- ``'always'``: PyTorch, even on GPUs for which CuPy has cuDNN;
- ``'never'``: Chainer.

The environment variable ``CHAINER_USE_TORCH`` sets the default. Chainer silently computes calls
that PyTorch does not support. ``python -m chainer_compat`` shows which library is used.

``expressions`` is the table with the PyTorch equivalent of each Chainer function. ``recording``
uses it to compute runs of functions on the CPU, and ``runs`` computes their gradients; ``kernels``
compute single functions. ``dispatch`` decides for each call, and ``tensors`` converts arrays.
``conversion`` builds PyTorch modules and ONNX files from the same table.
"""
