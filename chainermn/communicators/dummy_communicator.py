"""Packs and unpacks gradients but does not send them, to measure the cost of communication."""
from __future__ import annotations

from chainermn._transport.dummy_transport import DummyTransport
from chainermn.communicators.flat_communicator import FlatCommunicator


class DummyCommunicator(FlatCommunicator):
    """Does not average gradients, to measure a training step without communication.

    Each rank keeps its own gradients. They are still packed and, if the optimizer uses compression,
    compressed. All other operations, including ``bcast_data``, communicate.

    Example:
        >>> comm = chainermn.create_communicator('dummy')
        >>> model = L.Linear(3, 2)
        >>> model.b.grad = np.full(2, comm.rank, np.float32)
        >>> comm.multi_node_mean_grad(model)
        >>> model.b.grad  # still the gradient of rank 0
        array([0., 0.], dtype=float32)
    """

    transport_class = DummyTransport
