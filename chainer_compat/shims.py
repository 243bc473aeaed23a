"""All shims: one file per cause, one function per shim. Importing it fills the registry."""

import importlib

from chainer_compat.dialect import silent_changes

#: Shims of the same Chainer module are applied in this order: a later shim wraps the functions that
#: an earlier shim has set.
MODULES = (
    'fixes.chainer_bugs', 'fixes.cupy_changes', 'fixes.example_programs', 'dialect.silent_changes',
    'graph.gradients', 'graph.quick_graph', 'fixes.iterator_errors', 'fixes.iterator_state',
    'fixes.numpy_changes', 'dialect.old_arguments', 'dialect.old_attributes', 'dialect.old_links',
    'dialect.old_names', 'dialect.old_optimizers', 'dialect.old_pickles', 'dialect.old_snapshots',
    'fixes.optimizer_states', 'updates.optimizer_updates', 'fixes.protobuf_changes',
    'fixes.python_changes', 'pytorch.use_torch', 'fixes.saved_state', 'fixes.scipy_changes',
    'fixes.setuptools_changes', 'dialect.volatile',
)

for _name in MODULES:
    importlib.import_module(f'chainer_compat.{_name}')
silent_changes.register()
