"""Calls and names of Chainer 1 give what Chainer 1.24.0 gave."""

import copy
import importlib
import json
import pathlib
import pickle
import runpy
import sys
import textwrap
import warnings

import chainer
import numpy as np
import pytest

from chainer_compat.dialect import old_arguments

pytestmark = pytest.mark.mpi_skip

HERE = pathlib.Path(__file__).parent
SCRIPT = str(HERE / 'old_calls.py')
RECORDED = json.loads((HERE / 'old_calls.json').read_text())
PROGRAM = runpy.run_path(SCRIPT, run_name='old_calls')
#: Also valid in Chainer 7.
WITHOUT_WARNING = {'function', 'moved', 'Flag'}


def assert_equal(found, expected):
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for x, y in zip(found, expected, strict=True):
            assert_equal(x, y)
    elif isinstance(expected, float):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    else:
        assert found == expected


@pytest.mark.parametrize('name', PROGRAM['CASES'])
def test_values(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('default')
        found = PROGRAM['plain'](PROGRAM['CASES'][name]())
    assert_equal(found, RECORDED['values'][name])
    places = [(w.filename, w.lineno, str(w.message)) for w in caught
              if w.filename == SCRIPT and w.category is DeprecationWarning]
    assert bool(places) != (name in WITHOUT_WARNING)
    assert len({*places}) == len(places)


def test_no_warning_of_a_link_that_chainer_has():
    link = chainer.links.Parameter(np.ones(3, 'f'))
    link.cleargrads()
    chainer.functions.sum(link()).backward()  # warnings are errors
    np.testing.assert_array_equal(link.W.grad, np.ones(3))
    with pytest.warns(DeprecationWarning, match='volatile'):
        assert link(volatile='on').creator is None


def test_every_argument_is_used():
    source = pathlib.Path(SCRIPT).read_text() + (HERE / 'test_old_arguments.py').read_text()
    paths = {path.removesuffix('.__init__').removesuffix('.forward').split('.')[0]
             for rows in old_arguments.CALLS.values() for path in rows}
    missing = {path for path in paths if f'{path}' not in source}
    assert missing == UNUSED


#: Their rows are those of the classes beside them; Caffe needs an old version of protobuf.
UNUSED = {'BottleneckA', 'BottleneckB', 'BuildingBlock', 'CaffeFunction'}

#: Names that stay errors, and why.
GONE = {
    # Classes without a successor that has their arguments.
    'Ceil', 'Flatten', 'Floor', 'SpatialPyramidPooling2D', 'SquaredDifference',
    # Parts of the implementation.
    'thread_local', 'DummyDeviceType'}
#: Of other versions than 1.24.
OTHERS = {'chainer.functions': ['Arctan2', 'Flip', 'LayerNormalization', 'Prod'],
          'chainer.gradient_check': ['numerical_grad_cpu', 'numerical_grad_gpu']}


@pytest.mark.parametrize('module', RECORDED['names'])
def test_names(module):
    names = RECORDED['names'][module] + OTHERS.get(module, [])
    found = importlib.import_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        assert {name for name in names if not hasattr(found, name)} <= GONE
    for name in 'unknown', '_unknown', '__wrapped__':
        assert not hasattr(found, name)


def test_modern_programs_are_not_hooked(python):
    python(textwrap.dedent('''
        import chainer, chainer.links as L, numpy as np
        chainer.Variable(np.ones(2, "f"), name="a", requires_grad=False)
        L.Convolution2D(1, 1, 1)(np.ones((1, 1, 1, 1), "f"))
        for function in (chainer.FunctionNode.apply, chainer.Link.add_param,
                         L.Convolution2D.forward):
            assert function.__code__.co_filename.split("/")[-2] != "shims", function
    '''))


def test_moved_modules_are_the_modules_of_today():
    import chainer.links.connection.gru as old
    import chainer.links.rnn.gru as modern

    assert old is modern
    assert sys.modules['chainer.links.connection.gru'].__spec__.name == 'chainer.links.rnn.gru'


@pytest.mark.filterwarnings('ignore')
def test_copies_keep_volatile(python):
    """As in Chainer 1.24; also in another process."""
    variables = [chainer.Variable(np.ones(2, 'f'), flag) for flag in ('ON', 'OFF', 'AUTO')]
    for v in variables:
        copies = [copy.copy(v), copy.deepcopy(v), pickle.loads(pickle.dumps(v))]
        assert [repr(each.volatile) for each in copies] == [repr(v.volatile)] * 3
    said = python(f'import pickle\nfor v in pickle.loads({pickle.dumps(variables)}):\n'
                  '    print(v.volatile, (v + 1).volatile, (v + 1).creator is None)')
    assert said.splitlines() == ['ON ON True', 'OFF OFF False', 'AUTO AUTO False']


@pytest.mark.filterwarnings('error')
def test_volatile_of_a_subclass():
    """Any value that is no flag, as in Chainer 7."""
    variable = type('Price', (chainer.Variable,), {})(np.ones(2, 'f'))
    for value in 'market', [1]:
        variable.volatile = value
        assert variable.volatile is value
        assert (variable + 1).creator is not None
    with pytest.raises(ValueError, match='market'):
        chainer.Variable(np.ones(2), volatile='market')


def test_code_without_a_module_name():
    """``exec`` with an empty dictionary does not set it."""
    names = {}
    with pytest.warns(DeprecationWarning):
        exec('import chainer.functions as F, numpy as np\n'
             'y = F.relu(np.ones(2, "f"), use_cudnn=False)', names)
    assert names['y'].array.tolist() == [1, 1]


def test_allocators(monkeypatch):
    from chainer import cuda

    monkeypatch.setitem(sys.modules, 'cupy', np)
    monkeypatch.setattr(cuda, 'check_cuda_available', lambda: None)
    like = np.ones((2, 3), 'i')
    with pytest.warns(DeprecationWarning, match=r'use cupy\.'):
        found = [cuda.zeros((2, 3)), cuda.ones((2, 3), np.float64), cuda.full((2, 3), 4),
                 cuda.full((2, 3), 4, 'd'), cuda.zeros_like(like), cuda.full_like(like, 5),
                 cuda.empty((2, 3), dtype='i'), cuda.empty_like(like)]
    assert [y.dtype.char for y in found] == list('fdfdiiii')
    assert all(y.shape == (2, 3) for y in found)
    assert [y[0, 0] for y in found[:6]] == [0, 1, 4, 4, 0, 5]
