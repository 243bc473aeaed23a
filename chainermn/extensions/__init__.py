"""Extensions of Chainer's Trainer that work across ranks."""
from chainermn.extensions.multi_node_evaluator import create_multi_node_evaluator

__all__ = ['create_multi_node_evaluator']
