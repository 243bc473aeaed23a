"""The path of a mean gradient, from the communicator to shared memory."""

import os
import sys

import chainer.links as L
import numpy as np
import pytest

import chainermn

PACKAGE = os.path.dirname(chainermn.__file__) + os.sep

#: Messages of the consistency check and the time spent waiting for them: without gradients.
MESSAGES = ['_consistency/signature_exchange.py', '_timeline/activities.py', '_process/runtime.py']


def path_of(function):
    """The modules whose functions are called, in order."""
    modules = []

    def profile(frame, event, arg):
        file = frame.f_code.co_filename
        if event == 'call' and file.startswith(PACKAGE):
            module = file.removeprefix(PACKAGE).replace(os.sep, '/')
            if modules[-1:] != [module]:
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
    modules = [module for module in path_of(lambda: comm.multi_node_mean_grad(model))
               if module not in MESSAGES]
    assert modules[:modules.index('_transport/shared_memory/window.py')] == [
        '_operations/call.py', '_collectives/operation.py', '_collectives/models.py',
        '_gradients/parameters.py', '_gradients/tied_arrays.py', '_gradients/parameters.py',
        '_consistency/consistency_check.py', '_diagnostics/flight_recorder.py',
        '_transport/shared_memory/shared_memory_transport.py',
        '_transport/shared_memory/shared_sums.py']
    comm.finalize()
