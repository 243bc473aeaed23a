"""The abstract base class: same names as in ChainerMN 7, and not instantiable."""

import inspect

import numpy as np
import pytest
from version7 import Version7Communicator

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.datasets import scatter_index


def test_it_cannot_be_instantiated():
    with pytest.raises(TypeError, match='abstract'):
        CommunicatorBase()


def test_what_it_lacks_raises_an_error_with_advice():
    comm = Version7Communicator()
    for operation in (lambda: comm.irecv(0), lambda: comm.isend(np.ones(2), 0),
                      lambda: comm.waitall([]), lambda: comm.serve(len)):
        with pytest.raises(NotImplementedError, match=r"does not define '.*MpiComm"):
            operation()
    with pytest.raises(ValueError, match='reason'):
        comm.refuse('update', ValueError('reason'))
    comm.finalize()


def test_attributes_of_a_subclass_have_any_name():
    class Own(Version7Communicator):
        def __init__(self):
            super().__init__()
            self._channel = self._context = self._messages = self._rank = 'own'

    comm = Own()
    assert scatter_index(3 * comm.size, comm) == (3 * comm.rank, 3 * comm.rank + 3)
    comm.finalize()


def parameters(function):
    _, *others = inspect.signature(function).parameters.values()  # self may have another name
    return [(each.name, each.default) for each in others]


def test_communicators_have_the_parameters_of_the_base_class(comms):
    """test_public_paths.py compares them with ChainerMN 7."""
    for name, method in vars(CommunicatorBase).items():
        if inspect.isfunction(method) and not name.startswith('_'):
            for comm in comms:
                assert parameters(getattr(type(comm), name)) == parameters(method), name

