"""The exception with which a kernel or an expression leaves a call to Chainer."""


class Unsupported(Exception):  # noqa: N818 (a signal, not an error)
    """Raised by kernels and expressions for a call that Chainer has to compute.

    They raise it before they change anything.
    """
