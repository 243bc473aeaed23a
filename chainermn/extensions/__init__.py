"""Extensions of Chainer's Trainer that work across ranks."""
from chainermn.extensions._multi_node_snapshot import multi_node_snapshot
from chainermn.extensions.allreduce_persistent import AllreducePersistent
from chainermn.extensions.checkpoint import (
    MultiNodeCheckpointer,
    create_multi_node_checkpointer,
)
from chainermn.extensions.linear_scaling import LinearScaling
from chainermn.extensions.multi_node_early_stopping_trigger import MultiNodeEarlyStoppingTrigger
from chainermn.extensions.multi_node_evaluator import (
    GenericMultiNodeEvaluator,
    create_multi_node_evaluator,
)
from chainermn.extensions.multi_node_report import create_multi_node_report
from chainermn.extensions.observation_aggregator import ObservationAggregator
from chainermn.extensions.tensorboard_writer import TensorBoardWriter

__all__ = [
    'AllreducePersistent',
    'GenericMultiNodeEvaluator',
    'LinearScaling',
    'MultiNodeCheckpointer',
    'MultiNodeEarlyStoppingTrigger',
    'ObservationAggregator',
    'TensorBoardWriter',
    'create_multi_node_checkpointer',
    'create_multi_node_evaluator',
    'create_multi_node_report',
    'multi_node_snapshot',
]
