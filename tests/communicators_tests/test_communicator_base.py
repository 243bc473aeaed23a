"""The abstract base class: same names as in ChainerMN 7, and not instantiable."""

import inspect

import pytest

from chainermn.communicators import _CLASSES
from chainermn.communicators.communicator_base import CommunicatorBase

# Method: its parameters, as "name" or "name=default".
METHODS = {
    'join_turn': 'number',
    'allgather': 'x',
    'allreduce': "x op='sum' out=None",
    'allreduce_grad': 'model zero_fill=False',
    'allreduce_many': "xs op='sum'",
    'allreduce_obj': "obj op='sum'",
    'alltoall': 'xs',
    'at_update': 'number since_last',
    'called_by': 'caller',
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
    'recv_activation': 'source tag',
    'recv_gradient': 'activation',
    'recv_obj': 'source status=None tag=-1',
    'join_responses': 'error',
    'reduce': "x op='sum' root=0",
    'reduce_scatter': "xs op='sum'",
    'scatter': 'xs root=0',
    'scatter_obj': 'objs root=0',
    'send': 'data dest tag',
    'send_activation': 'data dest tag needs_gradient',
    'send_gradient': 'gradients activation',
    'send_obj': 'obj dest tag=0',
    'serve': 'answer',
    'set_config': 'name value=True kwargs',
    'split': 'color key',
    'waitall': 'requests',
}
PROPERTIES = ['inter_rank', 'inter_size', 'intra_rank', 'intra_size', 'rank', 'size',
              'within_config_scope', 'can_overlap']


def test_it_cannot_be_instantiated():
    with pytest.raises(TypeError, match='abstract'):
        CommunicatorBase()


def parameters(function):
    return ' '.join(
        name if parameter.default is parameter.empty else f'{name}={parameter.default!r}'
        for name, parameter in inspect.signature(function).parameters.items() if name != 'self')


@pytest.mark.parametrize('method', METHODS)
def test_methods(comms, method):
    """Communicators have the signatures of the base class."""
    assert parameters(getattr(CommunicatorBase, method)) == METHODS[method]
    for comm in comms:
        assert parameters(getattr(type(comm), method)) == METHODS[method]


@pytest.mark.parametrize('name', PROPERTIES)
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


def test_the_communicators_find_themselves(comms):
    found = {type(comm).__name__ for comm in comms}
    assert {'NaiveCommunicator', 'FlatCommunicator', 'DummyCommunicator'} <= found
    assert found <= {class_name for _, class_name in _CLASSES.values()}
