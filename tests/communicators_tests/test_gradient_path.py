"""The path of a gradient: six modules, each entered once."""

import os
import sys

import chainer.links as L
import numpy as np
import pytest

import chainermn

PACKAGE = os.path.dirname(chainermn.__file__) + os.sep

#: Modules that only read settings.
SWITCHES = ['_consistency/debug_checks.py', '_environment.py']
#: Messages of the consistency check, which contain no gradient.
MESSAGES = ['_consistency/exchange.py']


def path_of(function):
    """The modules whose functions are called, in order."""
    modules = []

    def profile(frame, event, arg):
        file = frame.f_code.co_filename
        if event == 'call' and file.startswith(PACKAGE):
            module = file.removeprefix(PACKAGE).replace(os.sep, '/')
            if module not in SWITCHES + MESSAGES and modules[-1:] != [module]:
                modules.append(module)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return modules


@pytest.mark.mpi(min_size=2)
def test_number_of_modules():
    comm = chainermn.create_communicator('flat')
    model = L.Linear(3, 2)
    for parameter in model.params():
        parameter.grad = np.ones_like(parameter.array)
    for _ in range(2):
        comm.multi_node_mean_grad(model)
    modules = path_of(lambda: comm.multi_node_mean_grad(model))
    assert modules[:modules.index('_transport/shared_memory/window.py')] == [
        '_collectives/operation.py', '_collectives/models.py', '_gradients/parameters.py',
        '_consistency/check.py', '_transport/shared_memory/transport.py',
        '_transport/shared_memory/exchange.py']
    comm.finalize()
