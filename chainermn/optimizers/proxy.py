"""Building blocks for optimizers that wrap a Chainer optimizer, such as the KVStore's.

Such an optimizer derives from :class:`OptimizerProxy` and defines ``update``::

    class LocalOptimizer(proxy.OptimizerProxy):
        def update(self, lossfun, *args):
            proxy.compute_gradients(self.actual_optimizer, lossfun(*args))
            ...  # change the gradients
            self.actual_optimizer.update()

If the optimizer writes its own files, use :func:`open_atomic`, which writes a file completely or
not at all.
"""
from chainermn._gradients.tied_arrays import sharing_memory
from chainermn._process.atomic_file import open_atomic
from chainermn.optimizers._full_update import init_state
from chainermn.optimizers._optimizer_proxy import (
    OptimizerProxy,
    compute_gradients,
    fill_missing_grad,
    keep_scale,
)
from chainermn.optimizers._optimizer_settings import Named, OptimizerSettings

__all__ = ['Named', 'OptimizerProxy', 'OptimizerSettings', 'compute_gradients',
           'fill_missing_grad', 'init_state', 'keep_scale', 'open_atomic', 'sharing_memory']
