"""The abstract base class: same names as in ChainerMN 7, and not instantiable."""

import inspect

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn
from chainermn.communicators import _CLASSES
from chainermn.communicators.communicator_base import CommunicatorBase

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
              'within_config_scope', '_channel']


def test_it_cannot_be_instantiated():
    with pytest.raises(TypeError, match='abstract'):
        CommunicatorBase()


class OfChainerMN7(CommunicatorBase):
    """A communicator of one rank that defines what ChainerMN 7 requires."""

    def __init__(self):  # like many, it does not call the base class
        self.broadcasts = 0

    rank = intra_rank = inter_rank = 0
    size = intra_size = inter_size = 1

    def split(self, color, key):
        return self

    def alltoall(self, xs):
        return tuple(xs)

    def send(self, data, dest, tag):
        pass

    def recv(self, source, tag):
        pass

    def bcast(self, data, max_buf_len=None, root=0):
        return data

    def gather(self, data, root=0):
        return data,

    def allgather(self, x):
        return x,

    def allreduce(self, data):
        return data.copy()

    def scatter(self, xs, root=0):
        return xs[0]

    def send_obj(self, obj, dest, tag):
        pass

    def recv_obj(self, source, tag):
        pass

    def bcast_obj(self, obj, max_buf_len=None, root=0):
        return obj

    def gather_obj(self, obj, root=0):
        return [obj]

    def allreduce_obj(self, obj):
        return obj

    def bcast_data(self, model):
        self.broadcasts += 1

    def multi_node_mean_grad(self, model, zero_fill=False):
        pass


def test_a_communicator_for_chainermn_7_trains_a_model():
    comm = OfChainerMN7()
    model = L.Linear(2, 1)
    before = model.W.array.copy()
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
    for _ in range(2):
        optimizer.update(lambda: F.sum(model(np.ones((1, 2), np.float32))))
    assert comm.broadcasts == 1
    assert np.allclose(model.W.array, before - 0.01)
    assert comm.get_config() == {}


def test_what_it_lacks_raises_an_error_with_advice():
    comm = OfChainerMN7()
    for operation in (lambda: comm.irecv(0), lambda: comm.isend(np.ones(2), 0),
                      lambda: comm.waitall([]), lambda: comm.serve(len)):
        with pytest.raises(NotImplementedError, match=r"OfChainerMN7 does not define '.*MpiComm"):
            operation()
    with pytest.raises(ValueError, match='reason'):
        comm.refuse('update', ValueError('reason'))


def parameters(function):
    return ' '.join(
        name if parameter.default is parameter.empty else f'{name}={parameter.default!r}'
        for name, parameter in [*inspect.signature(function).parameters.items()][1:])


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
