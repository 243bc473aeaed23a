"""ChainerMN: distributed training for Chainer.  The facade: the names that scripts use."""
from chainermn import (
    _environment,
    _forked,
    communicators,
    datasets,
    extensions,
    functions,
    global_except_hook,
    iterators,
    kvstore,
    links,
    optimizers,
)
from chainermn._join import join
from chainermn._launch import launch
from chainermn._version import __version__
from chainermn.communicators import (
    CollectiveMismatchError,
    CommunicatorBase,
    create_communicator,
)
from chainermn.datasets import DataSizeError, scatter_dataset, scatter_index
from chainermn.extensions import create_multi_node_checkpointer, create_multi_node_evaluator
from chainermn.links import MultiNodeChainList
from chainermn.optimizers import create_multi_node_optimizer

__all__ = [
    'CollectiveMismatchError',
    'CommunicatorBase',
    'DataSizeError',
    'MultiNodeChainList',
    '__version__',
    'communicators',
    'create_communicator',
    'create_multi_node_checkpointer',
    'create_multi_node_evaluator',
    'create_multi_node_optimizer',
    'datasets',
    'extensions',
    'functions',
    'global_except_hook',
    'iterators',
    'join',
    'kvstore',
    'launch',
    'links',
    'optimizers',
    'scatter_dataset',
    'scatter_index',
]

_environment.set_mpi_defaults()
_forked.skip_mpi_finalize_in_children()
global_except_hook._add_hook_if_enabled()
