"""All shims: one file per cause, one function per shim. Importing this fills the registry."""

from chainer_compat.shims import (
    chainer_bugs,
    cupy_changes,
    dialect,
    iterator_errors,
    iterator_state,
    numpy_changes,
    old_arguments,
    old_links,
    old_names,
    old_optimizers,
    old_pickles,
    optimizer_states,
    optimizer_updates,
    protobuf_changes,
    python_changes,
    pytorch,
    saved_state,
    scipy_changes,
    setuptools_changes,
    volatile,
)

__all__ = [
    'chainer_bugs',
    'cupy_changes',
    'dialect',
    'iterator_errors',
    'iterator_state',
    'numpy_changes',
    'old_arguments',
    'old_links',
    'old_names',
    'old_optimizers',
    'old_pickles',
    'optimizer_states',
    'optimizer_updates',
    'protobuf_changes',
    'python_changes',
    'pytorch',
    'saved_state',
    'scipy_changes',
    'setuptools_changes',
    'volatile',
]

dialect.register()
