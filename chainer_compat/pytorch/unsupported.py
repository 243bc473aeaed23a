"""How a kernel or an expression says that Chainer has to compute a call."""


class Unsupported(Exception):  # noqa: N818 (an answer rather than an error)
    """Raised by kernels for a call that Chainer has to compute.

    Kernels raise it before they change anything.
    """
