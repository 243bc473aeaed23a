"""Every collective of every communicator: values, errors of one rank, and calls that differ.

laws/test_collectives.py has random sequences of them.
"""

import re

import numpy as np
import pytest
from contract import (
    CASES,
    DTYPES,
    KINDS,
    NAMES,
    OF_ARRAYS,
    OPS,
    Array,
    Call,
    agree,
    call,
    compare,
    expected,
    play,
    step,
    steps_of,
)
from each_case import each_case

import chainermn
from chainermn._operations import table

pytestmark = pytest.mark.every_size

FIRST = Array(shape=(5,))
# Dtypes and layouts are nearly independent: each dtype is tested with the first array, and each
# other array as float32 and as this dtype. With --full, all combinations are tested.
ARRAYS = {
    FIRST: None,
    Array(shape=()): 'int64',
    Array('scalar', shape=()): 'float64',
    Array(shape=(2, 0, 3)): 'complex128',
    Array(): 'uint64',
    Array('fortran', shape=(3, 4)): 'uint16',
    Array('strided', shape=(3, 4)): 'float16',
    Array('negative strides', shape=(3, 4)): 'int8',
    Array('broadcast'): 'bool',
    Array('read-only', shape=(4,)): 'int32',
    Array('foreign'): 'complex64',
    Array('unaligned', shape=(5,)): 'float64',
    Array(shape=(1, 2, 1, 1, 2, 1, 1, 1, 2)): 'uint32',
    Array(shape=(9001,)): 'int16',
    Array('unaligned', shape=(9001,)): 'float32',
    Array('matrix', shape=(4, 3)): 'float32',
    Array('odd', shape=(4, 3)): 'float32',
    Array('grows', shape=(4, 3)): 'float32',
    Array('matrix', shape=(3000, 3)): 'float32',
}
ARGUMENTS = [(name, argument) for name, case in CASES.items() for argument in case.arguments]


def kind_of(name, argument):
    return KINDS[CASES[name].arguments[argument]]


def arrays(config):
    return [x._replace(dtype=dtype) for x, other in ARRAYS.items() for dtype in DTYPES
            if other in (None, dtype) or dtype == 'float32' or config.getoption('full')]


def in_turn(comms, n, config=None):
    """One of the communicators, another one for each n; with --full, all of them."""
    return comms if config and config.getoption('full') else [comms[n % len(comms)]]


def test_every_collective_has_a_contract():
    assert {*NAMES} == table.collectives()


@pytest.mark.parametrize('name', OF_ARRAYS)
def test_values(comms, name, request):
    for n, x in enumerate(arrays(request.config)):
        ops = OPS if x.shape == FIRST.shape or request.config.getoption('full') else [
            OPS[n % 2 if x.dtype[0] == 'c' else n % 4]]
        agree([play(comm, calls) for comm in in_turn(comms, n, request.config)
               for calls in steps_of(name, comm.size, x, ops)])


@each_case('x', arrays)
def test_messages(comms, x):
    """To all ranks at once, including itself, and one after another; tags are not confused."""
    for comm in in_turn(comms, x.seed + len(x.dtype) + len(x.layout)):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        one, two = x._replace(seed=comm.rank), x.grown(2)
        given = [one.make(), two.make()]
        sent = [comm.isend(data, rank, 3) for data in (given[0], tuple(given), [given[1]])
                for rank in range(comm.size)]
        received = [[comm.irecv(rank, 3) for rank in range(comm.size)] for _ in range(3)]
        for rank, each in enumerate(zip(*map(comm.waitall, reversed(received)), strict=True)):
            values = x._replace(seed=rank).value(), two.value()
            compare(each, (values[1:], values, values[0]))
        assert comm.waitall(sent) == [None] * len(sent)
        if comm.rank == 0 and comm.size > 1:
            comm.send(given[0], right, 3)
            comm.send(tuple(given), right, 5)
        if comm.rank == 1:
            values = x.value(), two.value()
            compare((comm.recv(left, 3), comm.recv(left, 5)), (values[0], values))
        for array, spec in zip(given, (one, two), strict=True):
            np.testing.assert_array_equal(np.asarray(array), spec.value())


@each_case('name, argument, n', [
    (*each, n) for each in ARGUMENTS for n in range(len(kind_of(*each).usual(4)))])
def test_other_arguments(comms, name, argument, n):
    """On all ranks, and on one: the value, or an error that shows what differs."""
    for comm in in_turn(comms, n + len(name) + len(argument)):
        values = kind_of(name, argument).usual(comm.size)
        if n >= len(values):
            continue
        usual, other = step(name, comm.size), step(name, comm.size, **{argument: values[n]})
        odd = (n + len(name)) % comm.size  # each rank in turn
        calls = (*usual[:odd], other[odd], *usual[odd + 1:])
        played = [play(comm, other), play(comm, calls)]
        agree(played)
        if expected(calls).is_mismatch:
            text = str(played[1].result)
            facts = [{*CASES[name].equal(each)} for each in (calls[odd], calls[odd - 1])]
            for fact in facts[0] ^ facts[1]:
                assert all(part in text for part in fact.split(' ', 1)), (fact, text)
            marked = [line for line in text.splitlines() if '<-' in line]
            assert comm.size == 2 or not marked or marked[-1].startswith(f'  rank {odd}: '), text
            assert ('zero_fill=True' in text) == (name == 'multi_node_mean_grad')


@each_case('name, argument, n', [
    (*each, n) for each in ARGUMENTS for n in range(len(kind_of(*each).wrong(4)))])
def test_a_wrong_argument_on_one_rank(comms, name, argument, n):
    case = CASES[name]
    for comm in in_turn(comms, n + len(name) + len(argument)):
        odd = (n + len(name)) % comm.size  # each rank in turn
        wrong = kind_of(name, argument).wrong(comm.size)
        if n >= len(wrong):
            continue
        usual = step(name, comm.size, **({'root': odd} if 'root' in case.arguments else {}))
        calls = [[Call(name, each.arguments | {argument: wrong[n]}) if rank == one else each
                  for rank, each in enumerate(usual)] for one in (odd, odd - 1)]
        assert expected(calls[0]).failed == (odd,)
        # A rank that is not the root may pass anything.
        others = calls[1:] if argument in case.only_of_root and comm.size > 1 else []
        agree([play(comm, each) for each in (calls[0], *others, step('allgather_obj', comm.size))])


@each_case('n', range(len(CASES)))
def test_different_operations(comms, n):
    """On one rank, and on every rank; the communicator remains usable."""
    for comm in comms:
        odd, names = n % comm.size, [*CASES]
        calls = [step(names[(n - (rank == odd)) % len(names)], comm.size)[rank]
                 for rank in range(comm.size)]
        every = [step(names[(n + rank) % len(names)], comm.size)[rank] for rank in range(comm.size)]
        played = [play(comm, each) for each in (calls, every, step('allgather_obj', comm.size))]
        agree(played)
        if comm.size > 1:
            text = str(played[0].result)
            assert f'rank {odd}: {names[n - 1]}' in text
            assert 'All ranks must call the same collectives in the same order' in text


@pytest.mark.mpi(min_size=2)
def test_finalize_on_one_rank(comm, same_error):
    error = same_error(call, comm, 'finalize' if comm.rank == 1 else 'barrier')
    assert 'rank 1: finalize' in str(error)


def test_two_names_of_a_dtype(comm):
    """Longlong is int64."""
    x = np.zeros(2, np.longlong if comm.rank == 0 else np.int64)
    assert comm.allreduce(x).dtype == np.int64


def test_errors_on_several_ranks(comm, same_error):
    """The lowest failed rank determines the type; the text contains all errors."""
    if comm.size > 1:
        last = comm.size - 1
        error = same_error(lambda: comm.gather(None) if comm.rank == last else comm.allreduce(
            np.ones(2), 'mean' if comm.rank == 0 else 'sum'))
        assert isinstance(error, ValueError)
        assert "rank 0: ValueError: op must be one of 'sum'" in str(error)
        assert f'rank {last}: TypeError: expected a numpy or cupy array' in str(error)


@pytest.mark.mpi(min_size=2)
@each_case('text, shown', [
    ('the real\n  reason', 'ValueError: the real reason'), ('', 'ValueError'),
    ('x' * 999, 'ValueError: ' + 'x' * 200)])
def test_an_exception_that_a_rank_is_handling_is_shown(comm, text, shown, check_usable):
    """As in "finally: comm.barrier()"; without it, the reason of the mismatch would be lost."""
    with pytest.raises(chainermn.CollectiveMismatchError) as caught:
        try:
            if comm.rank == 1:
                raise ValueError(text)
            comm.allgather_obj(1)
        finally:
            if comm.rank == 1:
                comm.barrier()
    found = re.search('rank 1: barrier, .*, while handling (.*?) +<- ', str(caught.value))
    assert found[1] == shown
    if comm.rank == 1:
        assert isinstance(caught.value.__context__, ValueError)
    check_usable(comm)


@each_case('peer, tag, kind', [
    *((bad, 0, TypeError) for bad in (None, '0', 0., True)),
    *((bad, 0, ValueError) for bad in (-100, 10**9, 2**70)),
    *((0, bad, TypeError) for bad in ('tag', 1.5, None)),
    *((0, bad, ValueError) for bad in (-5, 2**70))])
def test_invalid_peer_or_tag(comm, peer, tag, kind):
    """No rank waits for such a message, so only this rank raises."""
    for name in ('send', 'isend', 'send_obj', 'recv', 'irecv', 'recv_obj'):
        data = [np.ones(2)] if 'send' in name else []
        with pytest.raises(kind, match=r'^dest|^source|^tag'):
            getattr(comm, name)(*data, peer, tag=tag)


def test_messages_to_own_rank(comm):
    """Arrays would wait forever; objects may be sent, and errors are those of the sender."""
    for call_it in (lambda: comm.send(np.ones(2), comm.rank, 0), lambda: comm.recv(comm.rank, 0)):
        with pytest.raises(ValueError, match='this rank itself'):
            call_it()
    for send, receive in [(comm.send_obj, comm.recv_obj),
                          (comm.isend, lambda source: comm.irecv(source).wait())]:
        with pytest.raises(TypeError) as sent:
            send(lambda: 0, comm.rank)
        with pytest.raises(TypeError) as received:
            receive(comm.rank)
        assert str(received.value) == str(sent.value)
