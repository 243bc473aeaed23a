"""A valid call of every collective operation of a communicator."""

import chainer.links as L
import numpy as np

from chainermn._operations import table

X = np.arange(6, dtype=np.float32).reshape(2, 3)

#: In the order of the table.
NAMES = [each.name for each in table.OPERATIONS if each.name in table.collectives()]


def model():
    """A model with gradients, equal on all ranks."""
    link = L.Linear(3, 2, initialW=1)
    link.W.grad, link.b.grad = np.ones_like(link.W.array), np.ones_like(link.b.array)
    return link


def call(comm, name, root=0):
    """Call an operation.  Collective: every rank calls it."""
    xs = [X] * comm.size
    arguments = {
        'bcast': (X, root), 'gather': (X, root), 'scatter': (xs, root), 'reduce': (X, 'sum', root),
        'alltoall': (xs,), 'reduce_scatter': (xs,), 'allreduce_many': ([X, X],),
        'bcast_obj': ('x', 2**28, root), 'gather_obj': ('x', root), 'scatter_obj': (xs, root),
        'allgather_obj': ('x',), 'allreduce_obj': ('x',), 'bcast_data': (model(),),
        'multi_node_mean_grad': (model(),), 'split': (0, 0), 'new_group': ([0],), 'barrier': (),
        'finalize': ()}
    return getattr(comm, name)(*arguments.get(name, (X,)))
