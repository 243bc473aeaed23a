"""Extensions of Chainer's Trainer that work across ranks."""
from typing import TYPE_CHECKING

from chainermn._process import lazy_names
from chainermn.extensions.multi_node_evaluator import (
    GenericMultiNodeEvaluator,
    create_multi_node_evaluator,
)

if TYPE_CHECKING:
    from chainermn._records.run_record import RunRecord
    from chainermn.extensions._multi_node_snapshot import multi_node_snapshot
    from chainermn.extensions.allreduce_persistent import AllreducePersistent
    from chainermn.extensions.checkpoint import (
        MultiNodeCheckpointer,
        create_multi_node_checkpointer,
    )
    from chainermn.extensions.linear_scaling import LinearScaling
    from chainermn.extensions.multi_node_early_stopping_trigger import MultiNodeEarlyStoppingTrigger
    from chainermn.extensions.multi_node_report import create_multi_node_report
    from chainermn.extensions.observation_aggregator import ObservationAggregator
    from chainermn.extensions.progress_bar import ProgressBar
    from chainermn.extensions.tensorboard_writer import TensorBoardWriter
    from chainermn.extensions.torch_record import TorchRecord

__all__ = [
    'AllreducePersistent',
    'GenericMultiNodeEvaluator',
    'LinearScaling',
    'MultiNodeCheckpointer',
    'MultiNodeEarlyStoppingTrigger',
    'ObservationAggregator',
    'ProgressBar',
    'RunRecord',
    'TensorBoardWriter',
    'TorchRecord',
    'create_multi_node_checkpointer',
    'create_multi_node_evaluator',
    'create_multi_node_report',
    'multi_node_snapshot',
]

#: The module to import when a name is first used.
_LAZY = {
    'AllreducePersistent': 'chainermn.extensions.allreduce_persistent',
    'LinearScaling': 'chainermn.extensions.linear_scaling',
    'MultiNodeCheckpointer': 'chainermn.extensions.checkpoint',
    'MultiNodeEarlyStoppingTrigger': 'chainermn.extensions.multi_node_early_stopping_trigger',
    'ObservationAggregator': 'chainermn.extensions.observation_aggregator',
    'ProgressBar': 'chainermn.extensions.progress_bar',
    'RunRecord': 'chainermn._records.run_record',
    'TensorBoardWriter': 'chainermn.extensions.tensorboard_writer',
    'TorchRecord': 'chainermn.extensions.torch_record',
    'allreduce_persistent': 'chainermn.extensions.allreduce_persistent',
    'checkpoint': 'chainermn.extensions.checkpoint',
    'create_multi_node_checkpointer': 'chainermn.extensions.checkpoint',
    'create_multi_node_report': 'chainermn.extensions.multi_node_report',
    'linear_scaling': 'chainermn.extensions.linear_scaling',
    'multi_node_early_stopping_trigger': 'chainermn.extensions.multi_node_early_stopping_trigger',
    'multi_node_report': 'chainermn.extensions.multi_node_report',
    'multi_node_snapshot': 'chainermn.extensions._multi_node_snapshot',
    'observation_aggregator': 'chainermn.extensions.observation_aggregator',
    'progress_bar': 'chainermn.extensions.progress_bar',
    'tensorboard_writer': 'chainermn.extensions.tensorboard_writer',
    'torch_record': 'chainermn.extensions.torch_record',
}

if not TYPE_CHECKING:  # otherwise, type checkers would accept any name
    def __getattr__(name: str) -> object:
        return lazy_names.attribute(__name__, name, _LAZY)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY})
