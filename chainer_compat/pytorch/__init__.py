"""PyTorch for Chainer: to compute, and to export.

Chainer computes on the CPU with NumPy, which has no convolutions, and on GPUs without cuDNN, since
CuPy 14 dropped it. Where PyTorch is installed, it computes instead. Scripts do not change: arrays
stay NumPy or CuPy arrays, and share their memory with tensors.

``chainer.config.use_torch`` selects, for each call, who computes:

- ``'auto'`` (default): PyTorch, if it is installed, on the CPU and on GPUs that it can use, unless
  CuPy has cuDNN;
- ``'always'``: PyTorch, even on GPUs for which CuPy has cuDNN;
- ``'never'``: Chainer.

The environment variable ``CHAINER_USE_TORCH`` sets the default. Chainer silently computes what
PyTorch does not support. ``python -m chainer_compat`` shows what is used.

``expressions`` is the table with the PyTorch equivalent of each Chainer function. ``recording``
uses it to compute runs of functions on the CPU, and ``runs`` their gradients; ``kernels`` compute
single functions. ``dispatch`` decides for each call, and ``tensors`` converts. ``conversion``
builds PyTorch modules and ONNX files from the same table.
"""
