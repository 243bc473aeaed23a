"""The exception with which a kernel or an expression leaves a call to Chainer."""


class Unsupported(Exception):  # noqa: N818 (an answer rather than an error)
    """Raised by kernels for a call that Chainer has to compute.

    Kernels raise it before they change anything.
    """
