"""The error that all ranks raise: who said what, in few lines, and what to do."""

import pickle

import numpy as np
import pytest

from chainermn._consistency.mismatch import (
    CollectiveMismatchError,
    Refusal,
    calls_differ_error,
    common_error,
    refused_error,
)
from chainermn._signature import pack, unpack

F4, F2 = np.dtype('float32'), np.dtype('float16')


def headers(*packed):
    return [unpack(data) for data in packed]


def nothing(xs):
    return [None] * len(xs)


def test_dtypes():
    said = headers(pack('gather', (3, 2), F4, 0), pack('gather', (3, 1), F2, 0))
    error = common_error(said, nothing(said), nothing(said))
    assert type(error) is CollectiveMismatchError and isinstance(error, ValueError)
    assert str(error) == """\
gather refused: dtypes differ between the ranks; no data was exchanged
  rank 0: gather float32 (3, 2) root=0
  rank 1: gather float16 (3, 1) root=0   <- dtypes differ
Cast before the call, e.g. x.astype(numpy.float32)."""


def test_the_call_of_most_ranks_is_the_usual_one():
    said = headers(pack('allreduce', (3,), F4, op='sum'), pack('allreduce', (2,), F4, op='sum'),
                   pack('allreduce', (2,), F4, op='sum'))
    assert str(common_error(said, nothing(said), nothing(said))) == """\
allreduce refused: shapes differ between the ranks; no data was exchanged
  rank 0: allreduce float32 (3,) op='sum'   <- shapes differ
  ranks 1-2: allreduce float32 (2,) op='sum'
Make the shapes equal before the call; gather and allgather take different ones."""


@pytest.mark.parametrize('other, what', [
    (pack('allreduce', (2,), F4, op='max'), 'operations differ'),
    (pack('bcast', (2,), F4, root=0), 'verbs differ'),
    (pack('allreduce', (2,), F2, op='sum'), 'dtypes differ'),
    (pack('allreduce', (2, 1), F4, op='sum'), 'shapes differ'),
    (pack('allreduce', (1,) * 9, F4, op='sum'), 'shapes differ'),
])
def test_what_differs_is_marked(other, what):
    said = headers(*[pack('allreduce', (2,), F4, op='sum')] * 3, other)
    text = str(common_error(said, nothing(said), nothing(said)))
    assert [line.startswith('  rank 3:') for line in text.splitlines() if f'<- {what}' in line] \
        == [True]


def test_thousand_ranks_are_grouped():
    said = headers(*[pack('gather', (n % 2,), F4, 0) for n in range(1000)],
                   pack('gather', (0,), F4, 7))
    text = str(common_error(said, nothing(said), nothing(said)))
    # Two shapes take turns, but roots are what differs.
    assert text.startswith('gather refused: roots differ')
    assert len(text.splitlines()) == 5
    assert 'ranks 0, 2, 4, 6,' in text
    assert 'rank 1000: gather float32 (0,) root=7' in text
    said = headers(*[pack('barrier')] * 500, pack('allgather_obj'), *[pack('barrier')] * 500)
    assert '  ranks 0-499, 501-1000: barrier\n' in str(
        common_error(said, nothing(said), nothing(said)))


def test_parameters():
    said = headers(*[pack('multi_node_mean_grad', number=n) for n in (1, 1, 2)])
    usual = {'/a': 'float32 (2,)', '/b': 'float32 (3,)'}
    details = [usual, usual, {'/a': 'float32 (2,)', '/c': 'float16 ()'}]
    text = str(common_error(said, nothing(said), details))
    assert text.startswith('multi_node_mean_grad refused: parameters differ between the ranks')
    assert '  /b: float32 (3,) on ranks 0-1; nothing on rank 2\n' in text
    assert '  /c: nothing on ranks 0-1; float16 () on rank 2\n' in text
    assert '/a' not in text
    many = [{f'/{n:03}': 'x' for n in range(300)}, {}, {}]
    lines = str(common_error(said, nothing(said), many)).splitlines()
    assert len(lines) < 15
    assert '  and 290 more' in lines


def test_refusals():
    said = headers(*[pack('refused', refused=True), pack('gather', (2,), F4, 0)] * 2)
    refusals = [Refusal.of('gather', TypeError('no array')), None,
                Refusal.of('bcast', ValueError('no rank')), None]
    error = common_error(said, refusals, nothing(said))
    assert type(error) is TypeError
    assert str(error) == """\
gather refused on ranks 0, 2; no data was exchanged
  rank 0: TypeError: no array          <- refused
  ranks 1, 3: gather float32 (2,) root=0
  rank 2: ValueError: no rank          <- refused"""


def test_refused_everywhere():
    refusals = [Refusal.of('gather', TypeError('no array'))] * 3
    error = refused_error(['refused'] * 3, refusals)
    assert type(error) is TypeError
    assert str(error) == 'no array\n  (gather was refused on all ranks)'


def test_calls_differ():
    error = calls_differ_error('create', ["create('a')", "create('b')", "create('b')"])
    assert type(error) is CollectiveMismatchError and isinstance(error, ValueError)
    assert "rank 0: create('a')" in str(error)
    assert "ranks 1-2: create('b')\n" in str(error)
    assert '<- differs' in str(error).splitlines()[1]


class OwnError(ZeroDivisionError):
    pass


class TwoArgumentsError(ArithmeticError):
    def __init__(self, a, b):
        super().__init__(a, b)


@pytest.mark.parametrize('error, kind', [
    (TypeError('text'), TypeError), (OwnError('text'), ZeroDivisionError),
    (TwoArgumentsError('text', 2), ArithmeticError), (KeyError('text'), KeyError),
    (UnicodeDecodeError('ascii', b'\xff', 0, 1, 'text'), UnicodeError),
    (DeprecationWarning('text'), DeprecationWarning), (Exception('text'), Exception),
    (np.exceptions.AxisError('text'), (ValueError, IndexError)), (ValueError(), ValueError),
])
def test_refusals_travel(error, kind):
    refusal = pickle.loads(pickle.dumps(Refusal.of('verb', error)))
    made = refusal.error('line\nline')
    assert isinstance(made, kind)
    assert type(made).__module__.partition('.')[0] in ('builtins', 'chainermn')
    assert str(made) == 'line\nline'
    assert refusal.verb == 'verb'
    assert not error.args or 'text' in refusal.text


def test_where_the_ranks_called_it():
    said = headers(pack('bcast_obj', root=0), pack('barrier'))
    text = str(common_error(said, nothing(said), nothing(said),
                            [', in f() of g.py, called at train.py:3', ', called at train.py:4']))
    assert '  rank 0: bcast_obj root=0, in f() of g.py, called at train.py:3\n' in text
    assert '  rank 1: barrier, called at train.py:4 ' in text
    text = str(common_error(said, nothing(said), nothing(said), [', called at train.py:3'] * 2))
    assert 'called at' not in text
