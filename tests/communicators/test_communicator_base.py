"""The abstract base class: same names as in ChainerMN 7, and not instantiable."""

import inspect

import numpy as np
import pytest
from each_case import each_case
from version7 import Version7Communicator

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.datasets import scatter_index

# Method: its parameters, as "name" or "name=default".
METHODS = {
    'allgather': 'x',
    'allreduce': "x op='sum' out=None",
    'allreduce_grad': 'model zero_fill=False',
    'allreduce_many': "xs op='sum'",
    'allreduce_obj': "obj op='sum'",
    'alltoall': 'xs',
    'called_by': 'caller update=Update(number=0, since_last=0)',
    'barrier': '',
    'bcast': 'x root=0 max_buf_len=None',
    'bcast_data': 'model',
    'bcast_obj': 'obj max_buf_len=268435456 root=0',
    'broadcast_data': 'model',
    'config_scope': '',
    'finalize': '',
    'gather': 'x root=0',
    'gather_obj': 'obj root=0',
    'get_config': 'name=None',
    'irecv': 'source tag=0',
    'isend': 'x dest tag=0',
    'multi_node_mean': 'x',
    'multi_node_mean_grad': 'model zero_fill=False compression=None',
    'new_group': 'ranks',
    'recv': 'source tag',
    'recv_obj': 'source status=None tag=-1',
    'reduce': "x op='sum' root=0",
    'reduce_scatter': "xs op='sum'",
    'scatter': 'xs root=0',
    'scatter_obj': 'objs root=0',
    'send': 'data dest tag',
    'send_obj': 'obj dest tag=0',
    'serve': 'answer',
    'set_config': 'name value=True kwargs',
    'split': 'color key',
    'waitall': 'requests',
}
PROPERTIES = ['inter_rank', 'inter_size', 'intra_rank', 'intra_size', 'rank', 'size',
              'within_config_scope', '_chainermn_channel']


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
    return ' '.join(
        name if parameter.default is parameter.empty else f'{name}={parameter.default!r}'
        for name, parameter in [*inspect.signature(function).parameters.items()][1:])


@each_case('method', METHODS)
def test_methods(comms, method):
    """Communicators have the signatures of the base class."""
    assert parameters(getattr(CommunicatorBase, method)) == METHODS[method]
    for comm in comms:
        assert parameters(getattr(type(comm), method)) == METHODS[method]


@each_case('name', PROPERTIES)
def test_properties(comms, name):
    assert isinstance(getattr(CommunicatorBase, name), property)
    for comm in comms:
        with pytest.raises(AttributeError):
            setattr(comm, name, 1)


def test_everything_public_is_documented():
    for name, member in vars(CommunicatorBase).items():
        if not name.startswith('_'):
            member = getattr(CommunicatorBase, name)
            assert inspect.getdoc(member), name
