"""Laws of collectives and messages: NumPy's results, and the same errors on all ranks."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import pytest
from contract import (
    CASES,
    DTYPES,
    KINDS,
    LAYOUTS,
    NO_ARRAYS,
    OBJECTS,
    ON_GPU,
    UNPICKLABLE,
    Array,
    Arrays,
    Call,
    Model,
    Object,
    Outcome,
    Parameter,
    agree,
    check,
    compare,
    expected,
    for_rank,
    play,
    short,
)
from hypothesis import strategies as st
from laws.law import law, planted
from mpi4py import MPI
from version7 import Version7Communicator

from chainermn._collectives import reductions
from chainermn._consistency.consistency_check import ConsistencyCheck
from chainermn._operations import message_header
from chainermn._transport import array_buffers
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase

SIZE = MPI.COMM_WORLD.size


@dataclasses.dataclass(frozen=True)
class Program:
    """The calls on a communicator, step by step; the same on all ranks."""

    communicator: str
    steps: tuple


class Grouped(NamedTuple):
    """A step that creates groups, and the steps of each group, by its members."""

    create: tuple
    steps: dict


class Message(NamedTuple):
    """A message from one rank to another, and whether the receiver calls ``recv_obj``."""

    source: int
    dest: int
    tag: int
    payload: object
    wants_object: bool


def often(usual, *others):
    """Return a strategy that draws usual values in nine of ten cases."""
    return st.integers(0, 9).flatmap(lambda n: usual if n < 9 else st.sampled_from(others))


SHAPES = st.sampled_from([
    (3,), (), (1,), (2, 3), (0,), (2, 0, 3), (3, 2), (4, 1, 2), (1200,), (20000,), (3, 9000),
    (1, 2, 1, 1, 2, 1, 1, 1, 2)])
ONES = st.builds(Array, st.sampled_from(['plain'] * 6 + [*LAYOUTS]),
                 st.one_of(st.just('float32'), st.sampled_from(DTYPES)), SHAPES,
                 st.sampled_from([*range(6), 100, 101, 102]))
PARAMETERS = st.builds(
    Parameter, often(st.sampled_from(['float32', 'float64', 'float16']), 'int64'),
    st.sampled_from([(3,), (), (2, 3), (0,), (5000,)]),
    often(st.sampled_from(['grad', 'no grad', 'uninitialized']), 'read-only grad'),
    st.sampled_from(['plain', 'fortran', 'strided', 'negative strides', 'unaligned']),
    st.integers(0, 5))


@st.composite
def sequences(draw, size, n):
    """Draw n arrays of one dtype, or the rows of one array."""
    x = draw(ONES)
    if x.layout in ON_GPU and draw(st.booleans()):
        return Arrays('rows', (x._replace(shape=(n, *x.shape[:3])),))
    return Arrays(draw(st.sampled_from(['tuple', 'list'])), tuple(
        draw(ONES)._replace(dtype=x.dtype) for _ in range(n)))


#: Valid values of some kinds of arguments. The table lists all valid values of the other kinds.
USUAL = {
    'array': lambda size: ONES,
    'floats': lambda size: st.builds(
        lambda x, dtype: x._replace(dtype=dtype), ONES,
        st.sampled_from(['float16', 'float32', 'float64'])),
    'arrays': lambda size: sequences(size, size),
    'many': lambda size: st.builds(Arrays, st.sampled_from(['tuple', 'list']),
                                   st.lists(ONES, max_size=4).map(tuple)),
    'object': lambda size: st.builds(
        Object, st.sampled_from(['float'] * 4 + [
            kind for kind in OBJECTS if kind not in UNPICKLABLE]), st.integers(0, 5)),
    'objects': lambda size: st.lists(USUAL['object'](size), min_size=size, max_size=size).map(
        lambda objs: Arrays('list', tuple(objs))),
    'model': lambda size: st.lists(PARAMETERS, max_size=4).map(lambda ones: Model(tuple(ones))),
    'ranks': lambda size: st.permutations(range(size)).flatmap(
        lambda ranks: st.integers(1, size).map(lambda n: tuple(ranks[:n]))),
}


def values(kind, size, is_wrong):
    """Return a strategy that draws an argument."""
    usual = USUAL[kind](size) if kind in USUAL else st.sampled_from(KINDS[kind].usual(size))
    wrong = KINDS[kind].wrong(size)
    return often(usual, *wrong) if is_wrong and wrong else usual


class OwnError(KeyError):
    """A user-defined error. Other ranks raise a KeyError instead."""


@st.composite
def calls(draw, size, names, is_wrong=False):
    """Draw one call per rank, with different array elements; if ``is_wrong``, any calls."""
    def arguments(name):
        return draw(st.fixed_dictionaries({
            argument: values(kind, size, is_wrong)
            for argument, kind in CASES[name].arguments.items()}))

    name = draw(st.sampled_from(names))
    base, found = arguments(name), []
    for rank in range(size):
        how = draw(st.integers(0, 19)) if is_wrong else 0
        own = {argument: for_rank(value, rank) for argument, value in base.items()}
        if how == 19:
            error = draw(st.sampled_from([ValueError, OSError, UnicodeError, OwnError]))
            found.append(Call('refuse', {'error': error}))
            continue
        if how == 18:
            other = draw(st.sampled_from(names))
            found.append(Call(other, arguments(other)))
            continue
        if how == 17 or name == 'split':
            own = arguments(name)
        elif how > 14 and base:
            argument = draw(st.sampled_from(sorted(base)))
            own |= {argument: draw(values(CASES[name].arguments[argument], size, is_wrong))}
        elif name in ('gather', 'allgather') and not own['x'].is_bad:
            own['x'] = own['x'].grown(draw(st.integers(0, 2)))
        found.append(Call(name, own))
    return tuple(found)


@st.composite
def programs(draw, is_wrong=False, longest=6):
    communicator = draw(st.sampled_from(['flat', 'naive'] if is_wrong else [
        'flat', 'naive', 'flat', 'naive', 'version7']))
    drawn = st.tuples(calls(SIZE, names_of(communicator), is_wrong),
                      st.sampled_from([None, None, *range(SIZE)]))
    steps = [step for first, root in draw(st.lists(drawn, min_size=1, max_size=longest))
             for step in ([first] if root is None else [first, with_root(first, root)])]
    return Program(communicator, tuple(
        step for step in steps if communicator != 'version7' or suits_version7(step)))


def with_root(step, root):
    """Return the same calls with a different root, if they have one."""
    return tuple(Call(call.operation, call.arguments | (
        {'root': root} if 'root' in call.arguments else {})) for call in step)


def suits_version7(step):
    """Return whether a communicator of version 7, which neither checks nor converts, can run it."""
    odd = 'foreign', 'scalar', 'unaligned', 'matrix', 'odd', 'grows'
    return not expected(step).types and not any(f"'{layout}'" in repr(step) for layout in odd)


def names_of(communicator):
    """Return the cases for a communicator; for version 7, only the operations that it lacks."""
    return [name for name in CASES
            if communicator != 'version7' or name not in vars(Version7Communicator)]


def play_steps(comm, program):
    """Play each step on all ranks."""
    for step in program.steps:
        result = check(comm, step)
        if hasattr(result, 'finalize'):
            result.finalize()


def without_axes(checked):
    """A fault: arrays without dimensions become arrays of one element."""
    return lambda x: np.ascontiguousarray(checked(x))


@law(programs(), fault=planted(array_buffers, 'checked', without_axes), examples=25)
def test_values(comm, program):
    """Each rank gets the result that NumPy computes from all calls; arguments are unchanged."""
    play_steps(comm, program)


@law(programs(is_wrong=True), fault=planted(ConsistencyCheck, 'refuse', lambda refuse: (
    lambda self, operation, error: refuse(self, operation, RuntimeError(*error.args)))),
    examples=25)
def test_errors(comm, program):
    """Invalid arguments on one rank and mismatched calls raise the same error on all ranks."""
    play_steps(comm, program)


@st.composite
def differing(draw):
    """Draw valid calls, one of which has a different argument."""
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        step = draw(calls(SIZE, [name for name in CASES if CASES[name].arguments]))
        odd, other = draw(st.integers(0, SIZE - 1)), step[0].operation
        argument = draw(st.sampled_from(sorted(CASES[other].arguments)))
        value = draw(values(CASES[other].arguments[argument], SIZE, False))
        steps.append(tuple(Call(other, call.arguments | {argument: value}) if rank == odd else call
                           for rank, call in enumerate(step)))
    return Program(draw(st.sampled_from(['flat', 'naive'])), tuple(steps))


@pytest.mark.mpi(min_size=2)
@law(differing(), fault=planted(reductions, 'packed', lambda packed: (
    lambda operation, array, root=-1, op='': packed(operation, array, root))), examples=20)
def test_differing_arguments(comm, program):
    """If arguments differ between ranks, all ranks raise an error or get the correct values."""
    play_steps(comm, program)


# --- groups ---------------------------------------------------------------------------------------

@st.composite
def grouped(draw):
    communicator = draw(st.sampled_from(['flat', 'naive', 'version7']))
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        create = draw(calls(SIZE, ['split', 'new_group']))
        groups = {tuple(members) for members in expected(create).values if members}
        steps.append(Grouped(create, {members: tuple(
            draw(calls(len(members), names_of(communicator))) for _ in range(2))
            for members in sorted(groups)}))
    return Program(communicator, tuple(steps))


@pytest.mark.mpi(min_size=2)
@law(grouped(), fault=planted(MpiCommunicatorBase, 'split', lambda split: (
    lambda self, color, key: split(self, color, 0))), examples=15)
def test_groups(comm, program):
    """A group behaves like a communicator with its ranks."""
    for n_step, step in enumerate(program.steps):
        with comm.config_scope():
            comm.item_of_test = n_step
        group = check(comm, step.create)
        assert group is None or program.communicator == 'version7' or (
            group.get_config() == comm.get_config())
        members = expected(step.create).values[comm.rank]
        for n in range(2):
            calls_of_group = step.steps[tuple(members)][n] if members else None
            if members and (program.communicator != 'version7' or suits_version7(calls_of_group)):
                played = play(group, calls_of_group, group=members)
                if hasattr(played.result, 'finalize'):
                    played.result.finalize()
            else:
                played = Outcome('', None, (comm.rank, 'outside'), None)
            agree([played])
        if group is not None:
            group.finalize()


# --- messages -------------------------------------------------------------------------------------

#: Arrays that just fit into the first part of a message with other arrays, larger and smaller ones.
PARTS = st.builds(Array, st.just('plain'), st.sampled_from(['float32', 'int8']),
                  st.sampled_from([(1200,), (3,), (20000,)]), st.integers(0, 5))


@st.composite
def messages(draw):
    """Draw messages that are sent one after another, or by requests and received in any order."""
    payloads = st.one_of(
        ONES, st.builds(Arrays, st.sampled_from(['tuple', 'list']),
                        st.lists(ONES, max_size=3).map(tuple)
                        | st.lists(PARTS, min_size=3, max_size=6).map(tuple)),
        USUAL['object'](SIZE), often(
            ONES, *(Array(name) for name in NO_ARRAYS if name != 'pair'), Object('unpicklable')))
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        found = []
        for _ in range(draw(st.integers(1, 5))):
            payload = draw(payloads)
            found.append(Message(
                draw(st.integers(0, SIZE - 1)),
                draw(often(st.integers(0, SIZE - 1), -5, SIZE, None, 'a', True)),
                draw(often(st.integers(0, 2), -7, None, 2**40)), payload,
                isinstance(payload, Object) ^ draw(often(st.just(False), True))))
        by_requests = draw(st.booleans()) and not any(
            isinstance(each.payload, Object) for each in found)
        steps.append((tuple(found), draw(st.permutations(range(len(found)))) if by_requests
                      else None, draw(st.booleans())))
    return Program(draw(st.sampled_from(['flat', 'naive'])), tuple(steps))


def errors_of_sender(message, to_itself):
    """Return the errors that only the sender raises, before it sends anything."""
    source, dest, tag = message[:3]
    if not all(isinstance(x, int) and not isinstance(x, bool) for x in (dest, tag)):
        return (TypeError,)
    is_right = 0 <= dest < SIZE and 0 <= tag < 2**24 and (source != dest or to_itself)
    return () if is_right else (ValueError,)


def outcome(message, act, errors, value=None):
    """Send or receive. Check the result, or the error, which both ends raise."""
    try:
        result = act()
    except Exception as error:
        fault = '' if isinstance(error, errors) else f'{message} raised {error!r}'
        return Outcome(fault, (type(error).__name__, str(error)), message, error)
    try:
        assert not errors, f'gave {short(result)}'
        compare(result, value)
    except AssertionError as error:
        return Outcome(f'{message}: {error}', None, message, result)
    return Outcome('', None, message, result)


def send(way, message):
    """Send a message and change its arrays immediately."""
    data = message.payload.make()
    request = way(data, message.dest, message.tag)
    for array in data if isinstance(data, (tuple, list)) else [data]:
        if isinstance(array, np.ndarray) and array.flags.writeable:
            array.fill(0)
    return request


def value_of(payload):
    return payload.make() if isinstance(payload, Object) else tuple(
        payload.values()) if isinstance(payload, Arrays) else payload.value()


@law(messages(), fault=planted(message_header, 'of_array', lambda of_array: (
    lambda shape, *more: of_array(shape[::-1], *more))), examples=12)
def test_messages(comm, program):
    """Messages arrive unchanged and, for each tag, in the order in which they were sent."""
    for found, order, by_irecv in program.steps:
        # The outcomes of sends, then of receives. If a message fails, both ends share an error.
        outcomes = [Outcome('', None, rank, None) for rank in range(2 * len(found))]
        requests, sends = {}, []

        def receive(number, message, act, wants, bad):
            is_object = isinstance(message.payload, Object)
            errors = bad or ((TypeError,) if wants != is_object else ())
            got = outcome(message, act, errors, () if errors else value_of(message.payload))
            shares = bool(bad) and comm.rank != message.source
            outcomes[number if shares else len(found) + number] = got  # noqa: B023

        for number, message in enumerate(found):
            is_object = isinstance(message.payload, Object)
            own = errors_of_sender(message, is_object or order is not None)
            items = getattr(message.payload, 'items', (message.payload,))
            bad = (TypeError,) if any(item.is_bad for item in items) else ()
            if comm.rank == message.dest and order is not None and not own:
                requests[number] = bad, (
                    comm.irecv(message.source, message.tag).wait
                    if by_irecv or message.source == message.dest else functools.partial(
                        comm.recv, message.source, message.tag))
            if comm.rank == message.source:
                way = comm.send_obj if is_object else comm.send if order is None else comm.isend
                sent = outcome(message, lambda: sends.append(send(way, message)),  # noqa: B023
                               own or bad)
                outcomes[number] = sent
            if comm.rank == message.dest and order is None and not own:
                wants = is_object if message.source == message.dest else message.wants_object
                way = comm.recv_obj if wants else comm.recv
                receive(number, message, lambda: way(message.source, tag=message.tag),  # noqa: B023
                        wants, bad)
        for each in order or ():
            # Messages with the same source and tag arrive in the order in which they were sent.
            same = [one for one in requests if found[one][:3] == found[each][:3]]
            if same:
                bad, act = requests.pop(same[0])
                receive(same[0], found[same[0]], act, False, bad)
        comm.waitall([request for request in sends if request is not None])
        agree(outcomes)
