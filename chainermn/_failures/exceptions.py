"""The base class of this package's exceptions."""


class ChainerMNError(Exception):
    """The base class of the exceptions that ChainerMN defines.

    Each of them is also a ValueError or another exception of Python, and invalid arguments raise
    these. To catch every error of a collective, catch ``Exception``: an error of one rank is raised
    with its own type on all ranks.

    Example:
        >>> try:
        ...     comm.allreduce(np.ones(comm.rank))  # of different shapes
        ... except chainermn.ChainerMNError as error:
        ...     print(type(error).__name__)
        CollectiveMismatchError
    """


ChainerMNError.__module__ = 'chainermn'  # where users find it
