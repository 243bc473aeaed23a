"""Third-party communicators, which define only the methods that ChainerMN 7 requires."""

import numpy as np
from mpi4py import MPI

import chainermn


class Version7Communicator(chainermn.CommunicatorBase):
    """Implements the abstract methods of ChainerMN 7's CommunicatorBase with mpi4py."""

    def __init__(self, mpi_comm=MPI.COMM_WORLD):
        super().__init__()
        self.c = mpi_comm.Dup()

    rank = property(lambda self: self.c.rank)
    size = property(lambda self: self.c.size)
    intra_rank = rank
    intra_size = size
    inter_rank = property(lambda self: 0)
    inter_size = property(lambda self: 1)

    def split(self, color, key):
        return type(self)(self.c.Split(color, key))

    def alltoall(self, xs):
        assert isinstance(xs, tuple) and len(xs) == self.size
        return tuple(self.c.alltoall(xs))

    def send(self, data, dest, tag):
        self.c.ssend(data, dest, tag)

    def recv(self, source, tag):
        return self.c.recv(source=source, tag=tag)

    def bcast(self, data, max_buf_len=None, root=0):
        assert max_buf_len is None
        return self.c.bcast(data, root)

    def gather(self, data, root=0):
        arrays = self.c.gather(data, root)
        return None if arrays is None else tuple(arrays)

    def allgather(self, x):
        return tuple(self.c.allgather(x))

    def allreduce(self, data):
        with np.errstate(all='ignore'):  # a warning on one rank would be an error on it alone
            return np.asarray(self.c.allreduce(data))

    def scatter(self, xs, root=0):
        return self.c.scatter(xs, root)

    def send_obj(self, obj, dest, tag=0):
        self.c.send(obj, dest, tag)

    def recv_obj(self, source, tag=MPI.ANY_TAG):
        return self.c.recv(source=source, tag=tag)

    def bcast_obj(self, obj, max_buf_len=None, root=0):
        assert max_buf_len is None
        received = self.c.bcast(obj, root)
        return received

    def gather_obj(self, obj, root=0):
        return self.c.gather(obj, root)

    def allreduce_obj(self, obj):
        return self.c.allreduce(obj)

    def bcast_data(self, model):
        for _, param in sorted(model.namedparams()):
            if param.array is not None:
                param.array[...] = self.c.bcast(param.array)

    def multi_node_mean_grad(self, model, zero_fill=False):
        for _, param in sorted(model.namedparams()):
            if zero_fill and param.array is not None and param.grad is None:
                param.grad = np.zeros_like(param.array)
            if param.grad is not None:
                param.grad[...] = self.c.allreduce(param.grad) / self.size

    def finalize(self):
        self.c.Free()


class Subclass(Version7Communicator):
    """A class that derives from a third-party communicator."""

    def allreduce(self, data):
        return sum(self.allgather(data))


class WithoutInit(Version7Communicator):
    """Like many classes, does not call the constructor of CommunicatorBase."""

    def __init__(self, mpi_comm=MPI.COMM_WORLD):
        self.c = mpi_comm.Dup()


class Proxy:
    """Forwards all attributes to a communicator."""

    def __init__(self, comm):
        self._proxied = comm

    def __getattr__(self, name):
        if name == '_proxied':
            raise AttributeError(name)
        return getattr(self._proxied, name)


class PublicProxy(Proxy):
    """Forwards only attributes whose names do not begin with an underscore."""

    def __getattr__(self, name):
        if name.startswith('_'):
            raise AttributeError(name)
        return super().__getattr__(name)


class SameMethods:
    """Has the methods of version 7, but does not derive from CommunicatorBase."""

    for _name, _member in vars(Version7Communicator).items():
        if not _name.startswith('__'):
            locals()[_name] = _member

    def __init__(self, mpi_comm=MPI.COMM_WORLD):
        self.c = mpi_comm.Dup()


#: Functions that create third-party communicators, by name.
THIRD_PARTIES = {
    'version 7': Version7Communicator,
    'subclass': Subclass,
    'without init': WithoutInit,
    'same methods': SameMethods,
    'proxy of ours': lambda: Proxy(chainermn.create_communicator('flat')),
    'proxy of version 7': lambda: Proxy(Version7Communicator()),
    'public proxy of ours': lambda: PublicProxy(chainermn.create_communicator('naive')),
    'public proxy of version 7': lambda: PublicProxy(Version7Communicator()),
}
