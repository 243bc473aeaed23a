"""When the messages of a device are sent, which computes later than the host."""

import contextlib

import numpy as np
import pytest

from chainermn._operations.call import entered, local
from chainermn.links._pipeline.messages import Message, StageMessages
from chainermn.links._pipeline.stages import ListedLink, connect
from chainermn.links._pipeline.transfers import Transfers

pytestmark = pytest.mark.mpi_skip

FIRST, _ = STAGES = connect([[ListedLink('first', None, [1])], [ListedLink('last', [0], None)]])
EDGE, = FIRST.edges_out


class Device(Transfers):
    """A device that has computed a number of arrays."""

    n_computed = n_sent = 0

    def to_send(self, arrays):
        self.n_sent += 1
        return arrays, self.n_sent

    def is_reached(self, event):
        return event <= self.n_computed


class Request:
    """A message of another rank; it arrives after some tests."""

    def __init__(self, device, n_tests):
        self.device, self.n_tests = device, n_tests

    def test(self):
        self.n_tests -= 1
        self.device.n_computed += 1
        return self.n_tests <= 0

    @entered('wait')
    def wait(self):
        return np.array([1, 0, False]),


class Communicator:
    rank = 0

    def __init__(self, device, n_tests):
        self.sent, self.device, self.n_tests = [], device, n_tests

    def called_by(self, name):
        return contextlib.nullcontext()

    @entered('irecv')
    def irecv(self, source, tag):
        return Request(self.device, self.n_tests)

    @entered('isend')
    def isend(self, arrays, dest, tag):
        self.sent.append(int(arrays[0][1]))
        return Request(self.device, 0)

    @entered('barrier')
    def barrier(self):
        assert self.sent == [0, 1]


@contextlib.contextmanager
def messages(n_tests=0, n_computed=0):
    """Yield messages of rank 0, which has sent two; the device has computed some of them."""
    device = Device()
    device.n_computed = n_computed
    comm = Communicator(device, n_tests)
    with contextlib.closing(StageMessages(comm, STAGES, 1, device)) as found:
        found.post([(EDGE, 0, False)])
        for k in range(2):
            found.send(EDGE, k, True, Message((np.ones(2),), (1,), False))
        assert len(comm.sent) == n_computed
        yield found, comm, device


def test_the_next_step_sends_what_is_computed():
    with messages() as (found, comm, device):
        device.n_computed = 1
        found.send(EDGE, 2, True, Message((np.ones(2),), (1,), False))
        assert comm.sent == [0]


@pytest.mark.parametrize('n_tests, sent', [(1, []), (2, [0]), (9, [0, 1])])
def test_a_rank_that_waits_sends_what_is_computed(n_tests, sent):
    """It does not wait for more than the message, not even by its own wait()."""
    with messages(n_tests) as (found, comm, _):
        found.receive(EDGE, 0, False)
        assert comm.sent == sent


def test_all_is_sent_before_an_operation_of_the_program():
    """The other ranks may need the messages to call it."""
    with messages() as (_, comm, device):
        device.n_computed = 2
        comm.barrier()
        assert comm.sent == [0, 1]


@pytest.mark.parametrize('n_computed', [0, 2])
def test_operations_are_only_observed_while_messages_are_unsent(n_computed):
    before = [*local.thread.instruments]
    with messages(n_computed=n_computed) as (found, *_):
        assert local.thread.instruments == before + [found] * (n_computed == 0)
    assert local.thread.instruments == before


def test_all_is_sent_at_the_end():
    with messages() as (found, comm, device):
        device.n_computed = 2
        found.finish()
        assert comm.sent == [0, 1]
