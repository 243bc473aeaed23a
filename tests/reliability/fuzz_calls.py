"""Sequences of calls, drawn at random: most are right, some are wrong on one rank or on all."""
from __future__ import annotations

from typing import Any, NamedTuple

from fuzz_errors import Call
from fuzz_values import (
    LAYOUTS,
    NO_ARRAYS,
    OBJECTS,
    WIDE,
    Array,
    Arrays,
    Model,
    Object,
    Parameter,
    for_rank,
)
from hypothesis import strategies as st
from shared_fixtures import DTYPES


class Collective(NamedTuple):
    """One call on each rank; in groups of the communicator, if ``part`` creates them."""

    calls: tuple[Call, ...]
    part: tuple[Call, ...] | None = None


class Message(NamedTuple):
    """From one rank to another."""

    source: int
    dest: int
    tag: int
    payload: Array | Arrays | Object
    received: str  # 'array' or 'object'


class Messages(NamedTuple):
    """Messages, one after another or, with requests, all at once."""

    messages: tuple[Message, ...]
    by_requests: bool


class OwnError(KeyError):
    """An error that other ranks know as a KeyError."""


def seldom(usual: st.SearchStrategy[Any], *others: Any) -> st.SearchStrategy[Any]:
    """One of the others in about one of ten cases."""
    return st.integers(0, 9).flatmap(
        lambda n: usual if n < 9 else st.sampled_from(others))


SHAPES = st.sampled_from([
    (3,), (), (1,), (2, 3), (0,), (2, 0, 3), (3, 2), (4, 1, 2), (1200,), (20000,),
    (3, 9000), (1, 2, 1, 1, 2, 1, 1, 1, 2)])
SEEDS = seldom(st.integers(0, 5), WIDE, WIDE + 1, WIDE + 2)
DTYPE = st.one_of(st.just('float32'), st.sampled_from(DTYPES))
GOOD_ARRAY = st.builds(Array, st.one_of(st.just('plain'), st.sampled_from(LAYOUTS)), DTYPE, SHAPES,
                       SEEDS)
ARRAY = seldom(GOOD_ARRAY, *map(Array, NO_ARRAYS))
OP = seldom(st.sampled_from(['sum', 'prod', 'max', 'min']), 'mean', None, 3)
OBJECT = st.builds(Object, seldom(st.sampled_from([k for k in OBJECTS if k != 'unpicklable']),
                                  'unpicklable'), st.integers(0, 5))
OUT = seldom(st.sampled_from([None, 'new', 'self', 'overlap', 'fortran']),
             'no array', 'other shape', 'other dtype', 'read-only')
ERROR = st.sampled_from([ValueError, TypeError, KeyError, OSError, UnicodeError, OwnError])
PARAMETER = st.builds(
    Parameter, seldom(st.sampled_from(['float32', 'float32', 'float64', 'float16']), 'int64'),
    st.sampled_from([(3,), (), (2, 3), (0,), (5000,)]),
    seldom(st.sampled_from(['grad', 'grad', 'no grad', 'uninitialized']), 'read-only grad'),
    st.integers(0, 5))
MODEL = seldom(st.builds(Model, st.lists(PARAMETER, max_size=4).map(tuple)), Model(None))


def _root(size: int) -> Any:
    return seldom(st.integers(0, size - 1), -1, size, None, True, '0', 2 ** 70, 1.0)


@st.composite
def _arrays(draw: Any, size: int, kinds: tuple[str, ...] = ('tuple', 'list', 'rows')) -> Arrays:
    kind = draw(st.sampled_from(kinds))
    if kind == 'rows':
        x = draw(ARRAY)
        rows = draw(seldom(st.just(size), 0, size + 1))
        return Arrays(kind, (x._replace(shape=(rows, *x.shape[1:])) if x.shape else x,))
    number = draw(seldom(st.just(size), 0, 1, size + 1))
    dtype = draw(DTYPE)
    items = [x if draw(st.integers(0, 19)) == 0 else x._replace(dtype=dtype)
             for x in draw(st.lists(ARRAY, min_size=number, max_size=number))]
    return Arrays(kind, tuple(items))


def _many(size: int) -> Any:
    return seldom(st.builds(Arrays, st.sampled_from(['tuple', 'list']),
                            st.lists(ARRAY, max_size=4).map(tuple)),
                  Arrays('rows', (Array('plain', 'float32', (size,)),)))


def _objects(size: int) -> Any:
    usual = st.lists(OBJECT, min_size=size, max_size=size).map(tuple)
    return seldom(usual, None, (), (Object('int'),) * (size + 1))


#: The arguments of each operation, for a number of ranks.
ARGUMENTS: dict[str, Any] = {
    'bcast': lambda size: {'x': ARRAY, 'root': _root(size)},
    'gather': lambda size: {'x': ARRAY, 'root': _root(size)},
    'allgather': lambda size: {'x': ARRAY},
    'allreduce': lambda size: {'x': ARRAY, 'op': OP, 'out': OUT},
    'reduce': lambda size: {'x': ARRAY, 'op': OP, 'root': _root(size)},
    'allreduce_many': lambda size: {'xs': _many(size), 'op': OP},
    'reduce_scatter': lambda size: {'xs': _arrays(size), 'op': OP},
    'alltoall': lambda size: {'xs': _arrays(size)},
    'scatter': lambda size: {'xs': _arrays(size), 'root': _root(size)},
    'multi_node_mean': lambda size: {
        'x': st.builds(lambda x, dtype: x._replace(dtype=dtype), ARRAY, seldom(
            st.sampled_from(['float16', 'float32', 'float64']), 'int32', 'complex64'))},
    'bcast_obj': lambda size: {'obj': OBJECT, 'root': _root(size)},
    'gather_obj': lambda size: {'obj': OBJECT, 'root': _root(size)},
    'allgather_obj': lambda size: {'obj': OBJECT},
    'allreduce_obj': lambda size: {'obj': OBJECT, 'op': OP},
    'scatter_obj': lambda size: {'objs': _objects(size), 'root': _root(size)},
    'bcast_data': lambda size: {'model': MODEL},
    'multi_node_mean_grad': lambda size: {
        'model': MODEL, 'zero_fill': st.booleans(),
        'compression': seldom(st.sampled_from([None, None, 'fp16', 'bf16']), '2bit', 'none', 3)},
    'barrier': lambda size: {},
}
PARTS: dict[str, Any] = {
    'split': lambda size: {'color': seldom(st.integers(0, 2), -1, None, 'a', 1.5),
                           'key': seldom(st.integers(-2, 2), 'a')},
    'new_group': lambda size: {'ranks': seldom(
        st.permutations(range(size)).flatmap(
            lambda ranks: st.integers(1, size).map(lambda n: tuple(ranks[:n]))),
        (), (0, 0), (size,), (-1,), (True,), ('0',), 1, None, (0.5,))},
}
#: Operations to draw from.
OPERATIONS = st.sampled_from(sorted(ARGUMENTS))


@st.composite
def _calls(draw: Any, size: int, operation: str, among: int) -> tuple[Call, ...]:
    """One call on each rank, usually the same."""
    table = ARGUMENTS | PARTS
    base = draw(st.fixed_dictionaries(table[operation](among)))
    calls = []
    for rank in range(size):
        how = draw(st.integers(0, 29))
        if how == 29:
            call = Call('refuse', {'error': draw(ERROR)})
        elif how == 28:
            other = draw(OPERATIONS)
            call = Call(other, draw(st.fixed_dictionaries(table[other](among))))
        elif how >= 26 or operation == 'split':
            call = Call(operation, draw(st.fixed_dictionaries(table[operation](among))))
        elif how == 25 and base:  # one argument differs
            name = draw(st.sampled_from(sorted(base)))
            call = Call(operation, base | {name: draw(table[operation](among)[name])})
        else:
            call = Call(operation, {name: for_rank(value, rank) for name, value in base.items()})
        calls.append(call)
    return tuple(calls)


@st.composite
def _collective(draw: Any, size: int) -> Collective:
    among, part = size, None
    if draw(st.integers(0, 7)) == 7:
        part = draw(_calls(size, draw(st.sampled_from(sorted(PARTS))), size))
        among = draw(st.integers(1, size))
    return Collective(draw(_calls(size, draw(OPERATIONS), among)), part)


def _message(size: int) -> Any:
    payload = st.one_of(ARRAY, st.builds(Arrays, st.sampled_from(['tuple', 'list']),
                                         st.lists(ARRAY, max_size=3).map(tuple)), OBJECT)
    rank = seldom(st.integers(0, size - 1), -5, size, None, 'a', True)
    return st.builds(
        lambda source, dest, tag, payload, is_right: Message(
            source, dest, tag, payload,
            ('object' if isinstance(payload, Object) else 'array') if is_right else
            ('array' if isinstance(payload, Object) else 'object')),
        st.integers(0, size - 1), rank, seldom(st.integers(0, 2), -7, None, 2 ** 40), payload,
        seldom(st.just(True), False))


def sequences(size: int) -> Any:
    """Sequences of steps for that many ranks."""
    messages = st.builds(
        # send_obj may wait for its receiver, so it is not mixed with requests.
        lambda messages, by_requests: Messages(tuple(messages), by_requests and not any(
            isinstance(message.payload, Object) for message in messages)),
        st.lists(_message(size), min_size=1, max_size=4), st.booleans())
    step = st.integers(0, 4).flatmap(lambda n: messages if n == 4 else _collective(size))
    return st.lists(step, min_size=1, max_size=8)
