"""The mismatch error: the calls of the ranks, grouped, and a hint."""

import pickle

import numpy as np
import pytest

from chainermn._consistency.mismatch import (
    RemoteError,
    calls_differ_error,
    common_error,
)
from chainermn._operations.call_signature import pack, unpack
from chainermn._operations.table import END

F4, F2 = np.dtype('float32'), np.dtype('float16')


def signatures(*packed):
    return [unpack(data) for data in packed]


def nothing(xs):
    return [None] * len(xs)


@pytest.mark.parametrize('other, what', [
    (pack('allreduce', (2,), F4, op='max'), 'ops differ'),
    (pack('bcast', (2,), F4, root=0), 'operations differ'),
    (pack('allreduce', (2,), F2, op='sum'), 'dtypes differ'),
    (pack('allreduce', (2, 1), F4, op='sum'), 'shapes differ'),
    (pack('allreduce', (1,) * 9, F4, op='sum'), 'shapes differ'),
])
def test_differences_are_marked(other, what):
    calls = signatures(*[pack('allreduce', (2,), F4, op='sum')] * 3, other)
    text = str(common_error(calls, nothing(calls), nothing(calls)))
    assert [line.startswith('  rank 3:') for line in text.splitlines() if f'<- {what}' in line] \
        == [True]


def test_ranks_are_grouped():
    calls = signatures(*[pack('gather', (n % 2,), F4, 0) for n in range(1000)],
                   pack('gather', (0,), F4, 7))
    text = str(common_error(calls, nothing(calls), nothing(calls)))
    # Two shapes take turns, but roots are what differs.
    assert text.startswith('Collective mismatch in gather: roots differ')
    assert len(text.splitlines()) == 5
    assert 'ranks 0, 2, 4, 6,' in text
    assert 'rank 1000: gather float32 (0,) root=7' in text
    calls = signatures(*[pack('barrier')] * 500, pack('allgather_obj'), *[pack('barrier')] * 500)
    assert '  ranks 0-499, 501-1000: barrier\n' in str(
        common_error(calls, nothing(calls), nothing(calls)))


def test_parameters():
    calls = signatures(*[pack('multi_node_mean_grad', number=n) for n in (1, 1, 2)])
    usual = {'/a': 'float32 (2,)', '/b': 'float32 (3,)'}
    details = [usual, usual, {'/a': 'float32 (2,)', '/c': 'float16 ()'}]
    text = str(common_error(calls, nothing(calls), details))
    assert text.startswith(
        'Collective mismatch in multi_node_mean_grad: parameters differ between ranks')
    assert '  /b: float32 (3,) on ranks 0-1; nothing on rank 2\n' in text
    assert '  /c: nothing on ranks 0-1; float16 () on rank 2\n' in text
    assert '/a' not in text
    many = [{f'/{n:03}': 'x' for n in range(300)}, {}, {}]
    lines = str(common_error(calls, nothing(calls), many)).splitlines()
    assert len(lines) < 15
    assert '  and 290 more' in lines


def test_remote_errors():
    calls = signatures(*[pack('failed', failed=True), pack('gather', (2,), F4, 0)] * 2)
    failures = [RemoteError.of('gather', TypeError('no array')), None,
                RemoteError.of('bcast', ValueError('no rank')), None]
    error = common_error(calls, failures, nothing(calls))
    assert type(error) is TypeError
    assert str(error) == """\
gather failed on ranks 0, 2 (no data was sent)
  rank 0: TypeError: no array          <- failed
  ranks 1, 3: gather float32 (2,) root=0
  rank 2: ValueError: no rank          <- failed"""


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
def test_remote_errors_are_picklable(error, kind):
    failure = pickle.loads(pickle.dumps(RemoteError.of('operation', error)))
    made = failure.error('line\nline')
    assert isinstance(made, kind)
    assert type(made).__module__.partition('.')[0] in ('builtins', 'chainermn')
    assert str(made) == 'line\nline'
    assert failure.operation == 'operation'
    assert not error.args or 'text' in failure.text


def test_call_sites():
    calls = signatures(pack('bcast_obj', root=0), pack('barrier'))
    text = str(common_error(calls, nothing(calls), nothing(calls),
                            [', in chainermn.functions.f, called at train.py:3',
                             ', called at train.py:4']))
    assert '  rank 0: bcast_obj root=0, in chainermn.functions.f, called at train.py:3\n' in text
    assert '  rank 1: barrier, called at train.py:4 ' in text
    text = str(common_error(calls, nothing(calls), nothing(calls), [', called at train.py:3'] * 2))
    assert 'called at' not in text
    ended = signatures(pack(END), pack('failed', failed=True))
    text = str(common_error(ended, [None, RemoteError.of('next', ValueError('corrupt'))],
                            nothing(ended), ['', ', called at train.py:4']))
    assert text.splitlines()[1] == '  rank 0: end of the script'


@pytest.mark.mpi_skip
@pytest.mark.parametrize('size', [100, 1024])
def test_errors_of_many_ranks_are_short(size):
    shapes = signatures(*[pack('allreduce', (n,), F4, op='sum') for n in range(size)])
    digests = signatures(*[pack('multi_node_mean_grad', number=n) for n in range(size)])
    failed = signatures(pack('failed', failed=True)) * size
    sites = [f', called at train.py:{n}' for n in range(size)]
    texts = [str(error) for error in [
        common_error(shapes, nothing(shapes), nothing(shapes), sites),
        common_error(digests, nothing(digests), [
            {f'/{n}/W': f'float32 ({rank},)' for n in range(20)} for rank in range(size)]),
        common_error(failed, [RemoteError.of('gather', ValueError(f'file {n}\nis\nmissing'))
                              for n in range(size)], nothing(failed)),
        calls_differ_error([f'create({n})' for n in range(size)])]]
    for text in texts:
        assert len(text.splitlines()) <= 40
        assert max(map(len, text.splitlines())) <= 200
        assert f'({size - 4} ranks)' in text or f'({size - 10} ranks)' in text or (
            f'({size - 12} ranks)' in text)
    assert '  rank 0: allreduce float32 (0,) ' in texts[0]

