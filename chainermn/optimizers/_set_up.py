"""A Trainer of a multi-node optimizer without a model is an error that says what to do."""
from __future__ import annotations

import functools

from chainer.training import Extension, Trainer

from chainermn._types import Object
from chainermn.optimizers._multi_node_optimizer import MultiNodeOptimizer


def check_optimizers_of_trainers() -> None:
    """Change ``Trainer.__init__``, which would raise an AttributeError of ``None``."""
    init = Trainer.__init__

    @functools.wraps(init)
    def checked_init(self: Trainer, updater: Object, *args: Extension, **kwargs: Extension) -> None:
        for optimizer in updater.get_all_optimizers().values():
            if isinstance(optimizer, MultiNodeOptimizer):
                optimizer._check_set_up()
        init(self, updater, *args, **kwargs)

    Trainer.__init__ = checked_init
