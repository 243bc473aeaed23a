"""Extensions of Chainer's Trainer that work across ranks."""
from chainermn.extensions.allreduce_persistent import AllreducePersistent
from chainermn.extensions.multi_node_early_stopping_trigger import MultiNodeEarlyStoppingTrigger
from chainermn.extensions.multi_node_evaluator import (
    GenericMultiNodeEvaluator,
    create_multi_node_evaluator,
)
from chainermn.extensions.observation_aggregator import ObservationAggregator

__all__ = [
    'AllreducePersistent',
    'GenericMultiNodeEvaluator',
    'MultiNodeEarlyStoppingTrigger',
    'ObservationAggregator',
    'create_multi_node_evaluator',
]
