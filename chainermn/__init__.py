"""ChainerMN: distributed training for Chainer. This module exports the public API."""
import typing as _typing

from chainermn import (
    _at_import,
    communicators,
    datasets,
    extensions,
    global_except_hook,
    optimizers,
)
from chainermn._operations.exceptions import ChainerMNError
from chainermn._process import lazy_names as _lazy_names
from chainermn._version import __version__
from chainermn.communicators import (
    CollectiveMismatchError,
    CommunicatorBase,
    create_communicator,
)
from chainermn.datasets import DataSizeError, scatter_dataset, scatter_index
from chainermn.extensions import create_multi_node_evaluator
from chainermn.extensions._rank_filter import RankFilter
from chainermn.optimizers import MultiNodeOptimizer, create_multi_node_optimizer

if _typing.TYPE_CHECKING:
    from chainermn import functions, iterators, kvstore, links
    from chainermn._commands.launch import launch
    from chainermn.extensions import MultiNodeCheckpointer, create_multi_node_checkpointer
    from chainermn.links import MultiNodeChainList, Pipeline
    from chainermn.optimizers._join import join

__all__ = [
    'ChainerMNError',
    'CollectiveMismatchError',
    'CommunicatorBase',
    'DataSizeError',
    'MultiNodeChainList',
    'MultiNodeCheckpointer',
    'MultiNodeOptimizer',
    'Pipeline',
    'RankFilter',
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

_at_import.apply()

#: Names that are imported on first use, and the modules that define them.
_LAZY = {
    'MultiNodeChainList': 'chainermn.links',
    'MultiNodeCheckpointer': 'chainermn.extensions',
    'Pipeline': 'chainermn.links',
    'create_multi_node_checkpointer': 'chainermn.extensions',
    'functions': 'chainermn.functions',
    'iterators': 'chainermn.iterators',
    'join': 'chainermn.optimizers._join',
    'kvstore': 'chainermn.kvstore',
    'launch': 'chainermn._commands.launch',
    'links': 'chainermn.links',
}

#: Replacements for names that existed only before ChainerMN 1.0.
_BEFORE_1_0 = {
    'dataset': 'chainermn.datasets',
    'get_epoch_trigger': "the trigger (n_epochs, 'epoch')",
    'multi_node_evaluator': 'chainermn.create_multi_node_evaluator',
    'multi_node_optimizer': 'chainermn.create_multi_node_optimizer',
}

if not _typing.TYPE_CHECKING:  # otherwise, type checkers would accept any name
    def __getattr__(name: str) -> object:
        if name in _BEFORE_1_0:
            raise AttributeError(
                f'module {__name__!r} has no attribute {name!r}: use {_BEFORE_1_0[name]}')
        return _lazy_names.attribute(__name__, name, _LAZY)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY})
