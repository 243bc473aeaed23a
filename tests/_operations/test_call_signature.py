"""The call signature: round trip, and the parts that must be equal."""

import pickle

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from chainermn._operations import call_signature
from chainermn._operations.call_signature import (
    NAMES,
    PROGRAM,
    Caller,
    identifier,
    identifier_of_caller,
    pack,
    unpack,
    with_caller,
)
from chainermn._operations.table import CALL, DTYPE, SHAPE

pytestmark = pytest.mark.mpi_skip

SHAPES = st.lists(st.integers(0, 2**40), max_size=12).map(tuple)
TEXTS = st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)
HEADERS = st.fixed_dictionaries({
    'operation': st.sampled_from(NAMES),
    'shape': SHAPES,
    'dtype': st.none() | st.sampled_from(call_signature.DTYPES),
    'root': st.integers(-1, 2**31 - 1),
    'op': st.sampled_from(call_signature.OPS),
    'device': st.booleans(),
    'number': st.integers(0, 2**63 - 1),
    'failed': st.booleans(),
})


@hypothesis.given(HEADERS, st.integers(0, 3))
def test_round_trip(said, before):
    data = pack(**said)
    assert len(data) == call_signature.SIZE
    signature = unpack(b'x' * before + data + b'x', before)
    for name in ('operation', 'root', 'op', 'device', 'failed'):
        assert getattr(signature, name) == said[name]
    if said['dtype'] is None:
        assert signature.code == call_signature.NO_DTYPE
    else:
        assert signature.dtype == said['dtype']
    assert signature.ndim == len(said['shape'])
    if signature.ndim <= call_signature.MAX_INLINE_DIMS:
        assert (signature.shape, signature.number) == (said['shape'], said['number'])
    else:
        assert (signature.shape, signature.number) == ((), call_signature.digest(said['shape']))


@hypothesis.given(HEADERS, HEADERS)
def test_keys_differ_where_the_calls_do(said, other):
    a, b = unpack(pack(**said)), unpack(pack(**other))
    equal = all(said[name] == other[name] for name in ('operation', 'root', 'op'))
    assert (a.key(CALL) == b.key(CALL)) == equal
    equal = equal and said['dtype'] == other['dtype']
    assert (a.key(DTYPE) == b.key(DTYPE)) == equal
    long = max(len(said['shape']), len(other['shape'])) > call_signature.MAX_INLINE_DIMS
    equal = equal and said['shape'] == other['shape'] and (
        long or said['number'] == other['number'])
    assert (a.key(SHAPE) == b.key(SHAPE)) == equal


def test_every_operation_and_dtype_has_its_own_number():
    assert {unpack(pack(operation)).operation for operation in NAMES} == set(NAMES)
    assert {unpack(pack('bcast', dtype=dtype)).dtype for dtype in call_signature.DTYPES} \
        == set(call_signature.DTYPES)
    assert len(NAMES) < 256
    assert len(call_signature.DTYPES) < call_signature.NO_DTYPE


@hypothesis.settings(max_examples=20)
@hypothesis.given(TEXTS, TEXTS)
def test_digest(a, b):
    assert 0 <= call_signature.digest(a) < 2**63
    is_equal = call_signature.digest(a) == call_signature.digest(b)
    assert is_equal == (list(a.items()) == list(b.items()))


def test_callers():
    callers = [PROGRAM, Caller('a'), Caller('b'), Caller('a', {'n': '1'}), Caller('a', {'n': '2'})]
    for signature in pack('barrier'), pack('allreduce', (3,), np.dtype('f4'), op='sum'):
        digests = [caller.identity for caller in callers]
        assert len({identifier_of_caller(signature, digest) for digest in digests}) == len(callers)
        assert identifier_of_caller(signature, PROGRAM.digest) == identifier(signature)
        for caller in callers:
            call = unpack(with_caller(signature, caller.digest))
            assert call == unpack(signature)._replace(caller=caller.digest)
    changed = Caller('a')
    changed.set_options({'n': '1'})
    assert changed.digest == callers[3].digest
    digest = changed.digest
    changed.set_state(lambda: {'lr': '0.1'}, dict)
    changed.set_digests(5, 0)
    assert changed.digest != digest and changed.options == {'n': '1', 'lr': '0.1'}
    copy = pickle.loads(pickle.dumps(changed))
    assert (copy.digest, copy.options) == (changed.digest, changed.options)
    changed.set_state(dict, dict)
    changed.set_digests(0, 7)
    assert changed.digest == digest and changed.options == {'n': '1'}
    assert changed.identity != digest  # they differ in what may differ
    changed.accept_differences()
    assert changed.identity == digest


def test_digest_is_the_same_in_every_process():
    """In contrast, the hash of a str differs between processes."""
    assert call_signature.digest({'/l/W': 'float32 (2, 3)'}) == 5886114457919603993
    assert call_signature.digest((1, 2, 3)) == 2904650318439132554

