"""Iterators for several ranks: the same batches, different samples, or sharded datasets."""
from chainermn._operations.exceptions import ShardError
from chainermn.iterators.multi_node_iterator import create_multi_node_iterator
from chainermn.iterators.order_sampler import MultiNodeOrderSampler
from chainermn.iterators.sharded_iterator import ShardedIterator
from chainermn.iterators.synchronized_iterator import create_synchronized_iterator

__all__ = [
    'MultiNodeOrderSampler',
    'ShardError',
    'ShardedIterator',
    'create_multi_node_iterator',
    'create_synchronized_iterator',
]
