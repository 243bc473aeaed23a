"""The public names of ChainerMN."""

import importlib
import inspect

import chainermn

PACKAGES = [
    'chainermn', 'chainermn.communicators', 'chainermn.communicators.compression',
    'chainermn.communicators.errors', 'chainermn.communicators.transport', 'chainermn.datasets',
    'chainermn.extensions',
    'chainermn.functions', 'chainermn.iterators', 'chainermn.kvstore', 'chainermn.links',
    'chainermn.optimizers', 'chainermn.optimizers.proxy', 'chainermn.testing',
]

#: Names that are only public in their own module: communicator classes and deprecated names.
BY_MODULE = [
    'chainermn.communicators.mpi_communicator_base.MpiCommunicatorBase',
    *(f'chainermn.communicators.{module}.{name}'
      for module, name in chainermn.communicators._CLASSES.values()),
    'chainermn.datasets.scatter.get_epoch_trigger',
    'chainermn.datasets.scatter.get_n_iterations_for_one_epoch',
    'chainermn.global_except_hook.add_hook',
]


def find(path):
    module, _, name = path.rpartition('.')
    return getattr(importlib.import_module(module), name)


def public():
    """Return the names that new programs use."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            if not inspect.ismodule(getattr(module, name)) and name != '__version__':
                yield f'{package}.{name}'
    yield from BY_MODULE
