"""Iterators that return the same batches on several ranks, and an order sampler."""
from chainermn.iterators.multi_node_iterator import create_multi_node_iterator
from chainermn.iterators.order_sampler import MultiNodeOrderSampler
from chainermn.iterators.synchronized_iterator import create_synchronized_iterator

__all__ = ['MultiNodeOrderSampler', 'create_multi_node_iterator', 'create_synchronized_iterator']
