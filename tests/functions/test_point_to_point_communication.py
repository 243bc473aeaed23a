"""send and recv against the same graph in one process."""
import os
import re

import chainer
import chainer.functions as F
import numpy as np
import pytest
from shared_fixtures import communicators

import chainermn.functions as mnf

pytestmark = pytest.mark.every_size


comm = communicators('naive', 'version7', min_size=2)


def test_device_of_old_versions_is_ignored(comm):
    if comm.rank == 0:
        mnf.send(np.ones(2, np.float32), comm, 1)
    elif comm.rank == 1:
        with pytest.warns(DeprecationWarning, match='device'):
            y = mnf.recv(comm, 0, device=-1)
        assert (y.array == 1).all()


def test_own_rank_is_rejected(comm):
    with pytest.raises(ValueError, match='must not be this rank'):
        mnf.send(np.ones(1, np.float32), comm, comm.rank)
    with pytest.raises(ValueError, match='must not be this rank'):
        mnf.recv(comm, comm.rank)


def test_a_rank_that_does_not_exist_is_rejected(comm):
    expected = rf'rank must be from 0 to {comm.size - 1}, not {comm.size}'
    with pytest.raises(ValueError, match=f'chainermn.functions.send: {expected}'):
        mnf.send(np.ones(1, np.float32), comm, comm.size)
    with pytest.raises(ValueError, match=f'chainermn.functions.recv: {expected}'):
        mnf.recv(comm, comm.size)
    with pytest.raises(TypeError, match=r'functions\.recv: rank must be an integer'):
        mnf.recv(comm, None)


def test_nothing_to_send_is_rejected(comm):
    with pytest.raises(ValueError, match='at least one'):
        mnf.send((), comm, (comm.rank + 1) % comm.size)


def line_of(text):
    with open(__file__, encoding='utf-8') as file:
        return next(f'{os.path.basename(__file__)}:{number}' for number, line
                    in enumerate(file, 1) if line.endswith(f'# {text}\n'))


#: Inputs of send that need no gradient.
WITHOUT_GRADIENT = {
    'array': lambda: np.ones(2, np.float32),
    'Variable without gradient': lambda: chainer.Variable(
        np.ones(2, np.float32), requires_grad=False),
    'tuple': lambda: (np.ones(2, np.float32), np.ones(3, np.float64)),
    'large': lambda: np.ones(100_000, np.float32),
}


@pytest.mark.parametrize('kind', WITHOUT_GRADIENT)
@pytest.mark.parametrize('sender_runs_backward', [True, False])
@pytest.mark.parametrize('receiver_runs_backward', [True, False])
def test_no_gradient_is_exchanged_where_none_is_needed(
        comm, kind, sender_runs_backward, receiver_runs_backward):
    """Whoever runs backward: nobody waits, and the next message is the one that was sent next."""
    for _ in range(3):
        if comm.rank == 0:
            delegate = mnf.send(WITHOUT_GRADIENT[kind](), comm, 1)
            if sender_runs_backward:
                delegate.backward()
        elif comm.rank == 1:
            y = mnf.recv(comm, 0)
            ys = y if isinstance(y, tuple) else (y,)
            if receiver_runs_backward:
                sum(F.sum(F.cast(2 * y, 'd')) for y in ys).backward(retain_grad=True)
                assert all((y.grad == 2).all() for y in ys)
            assert all((y.array == 1).all() for y in ys)
    check_next_message(comm)


def check_next_message(comm):
    """What comes next is no gradient that is left over."""
    if comm.rank < 2:
        comm.send_obj(f'from {comm.rank}', 1 - comm.rank)
        assert comm.recv_obj(1 - comm.rank) == f'from {1 - comm.rank}'


def test_no_backprop_mode(comm):
    if comm.rank == 0:
        x = chainer.Variable(np.ones(2, np.float32))
        with chainer.no_backprop_mode():
            delegate = mnf.send(x, comm, 1)
        delegate.backward()
        assert x.grad is None
    elif comm.rank == 1:
        F.sum(mnf.recv(comm, 0)).backward()
    check_next_message(comm)


def test_some_inputs_need_a_gradient(comm):
    if comm.rank == 0:
        a, b = np.ones(2, np.float32), chainer.Variable(np.ones(3, np.float32))
        mnf.send((a, b), comm, 1).backward()
        assert (b.grad == 3).all()
    elif comm.rank == 1:
        a, b = mnf.recv(comm, 0)
        (F.sum(2 * a) + F.sum(3 * b)).backward()
    check_next_message(comm)


def test_recv_after_a_send_that_needs_no_gradient(comm):
    """Its delegate leads nowhere, but backward has to come to what is received after it."""
    if comm.rank == 0:
        delegate = mnf.send(np.full(2, 5, np.float32), comm, 1)
        back = mnf.recv(comm, 1, delegate_variable=delegate)
        F.sum(back * back).backward()
    elif comm.rank == 1:
        weight = chainer.Parameter(np.full(2, 3, np.float32))
        mnf.send(weight * mnf.recv(comm, 0), comm, 0).backward()
        np.testing.assert_array_equal(weight.grad, [2 * 15 * 5] * 2)
    check_next_message(comm)


@pytest.mark.compares_calls
def test_with_send_and_recv_of_the_communicator(comm):
    """Either side may do by hand what these functions do."""
    x = chainer.Variable(np.arange(3, dtype=np.float32))
    if comm.rank == 0:
        mnf.send(x, comm, 1).backward()
        np.testing.assert_array_equal(x.grad, 2 * x.array)
        comm.send(x.array, 1, 0)
        np.testing.assert_array_equal(comm.recv(1, 0), [7] * 3)
        mnf.send(x.array, comm, 1)
    elif comm.rank == 1:
        comm.send(2 * comm.recv(0, 0), 0, 0)
        F.sum(7 * mnf.recv(comm, 0)).backward()
        np.testing.assert_array_equal(comm.irecv(0, 0).wait(), x.array)
    check_next_message(comm)


@pytest.mark.compares_calls
def test_from_any_rank_with_any_tag(comm):
    if comm.rank == 0:
        x = chainer.Variable(np.ones(2, np.float32))
        mnf.send(x, comm, 1, tag=5).backward()
        assert (x.grad == 4).all()
    elif comm.rank == 1:
        F.sum(4 * mnf.recv(comm, -2, tag=-1)).backward()  # MPI.ANY_SOURCE, MPI.ANY_TAG
    check_next_message(comm)


@pytest.mark.compares_calls
def test_a_gradient_is_not_taken_for_data(comm):
    x = chainer.Variable(np.ones(2, np.float32))
    if comm.rank == 1:
        for _ in range(3):
            F.sum(mnf.recv(comm, 0)).backward()  # receives and runs backward
    if comm.rank == 0:
        for receive in (lambda: mnf.recv(comm, 1), lambda: comm.recv(1, 0),
                        lambda: comm.irecv(1, 0).wait()):
            mnf.send(x, comm, 1)
            with pytest.raises(ValueError, match='rank 0 got a gradient from rank 1 where') as info:
                receive()
            there = line_of('receives and runs backward')
            assert re.search(
                rf'  rank 0: recv from rank 1 with tag 0, called at {os.path.basename(__file__)}'
                rf':\d+\n  rank 1: backward, called at {there}, sends the gradient of recv from '
                rf'rank 0 with tag 0, called at {there}\n', str(info.value))
    check_next_message(comm)


@pytest.mark.compares_calls
def test_data_is_not_taken_for_a_gradient(comm):
    x = chainer.Variable(np.ones(2, np.float32))
    if comm.rank == 0:
        delegate = mnf.send(x, comm, 1)  # the first one
        with pytest.raises(ValueError, match='rank 0 got data from rank 1 where it exp') as info:
            delegate.backward()  # of the first one
        assert (f'  rank 0: backward, called at {line_of("of the first one")}, waits for the '
                f'gradient of send to rank 1 with tag 0, called at {line_of("the first one")}\n'
                f'  rank 1: send to rank 0 with tag 0, called at {line_of("without backward")}\n'
                ) in str(info.value)
        assert x.grad is None
    elif comm.rank == 1:
        mnf.recv(comm, 0)
        mnf.send(x, comm, 0)  # without backward
    check_next_message(comm)


@pytest.mark.compares_calls
def test_the_flight_record_names_what_a_gradient_belongs_to(comm):
    """The report of a deadlock shows the newest call."""
    if comm.rank == 0:
        mnf.send(chainer.Variable(np.ones(2, np.float32)), comm, 1).backward()  # to be named
        operation = 'backward of chainermn.functions.send'
        forward = f'the send at {line_of("to be named")}'
    elif comm.rank == 1:
        y = mnf.recv(comm, 0)  # named, too
        F.sum(y).backward()
        operation = 'backward of chainermn.functions.recv'
        forward = f'the recv at {line_of("named, too")}'
    if comm.rank < 2:
        call = comm._context.messages.record.newest
        assert (call.operation, call.peer) == (operation, 1 - comm.rank)
        assert call.details.endswith(f' rank {1 - comm.rank} tag 0 of {forward}')

