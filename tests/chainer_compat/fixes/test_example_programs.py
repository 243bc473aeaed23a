"""Scripts that copied bugs from Chainer's examples run as if the examples were correct."""

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer.utils import argument

pytestmark = pytest.mark.mpi_skip


def classes(n=10, **kwargs):
    old = argument.parse_kwargs(kwargs, ('num_classes', None))
    if old is not None:
        n = old
    return n


def classes_in_lines(n=10, **kwargs):
    old = argument.parse_kwargs(
        kwargs,
        ('num_classes',
         None))
    return n if old is None else old


def unpacked(**kwargs):
    value, = argument.parse_kwargs(kwargs, ('value', None))
    return value


def indexed(**kwargs):
    value = argument.parse_kwargs(kwargs, ('value', None))
    return value[0]


def returned(**kwargs):
    return argument.parse_kwargs(kwargs, ('value', None))


def other_name(other=None, **kwargs):
    value = argument.parse_kwargs(kwargs, ('value', other))
    return value if other is None else other


@pytest.mark.parametrize('function', [classes, classes_in_lines])
def test_an_option_that_is_compared_with_none(function):
    with pytest.warns(UserWarning, match='write num_classes, = '):
        assert function(5) == 5
    with pytest.warns(UserWarning):
        assert function(5, num_classes=7) == 7
    with pytest.raises(TypeError, match=r'classes(_in_lines)?\(\) got unexpected'):
        function(5, anything=7)


def test_other_options_are_tuples():
    assert unpacked(value=3) == indexed(value=3) == 3
    assert returned(value=3) == other_name(value=3) == (3,)
    namespace = {'argument': argument, '__name__': 'without_source'}
    exec('def f(**kw):\n    x = argument.parse_kwargs(kw, ("a", 1))\n    return x is None or x',
         namespace)
    assert namespace['f']() == (1,)


class Part(L.Convolution2D):
    def __init__(self, in_channels, out_channels, n_parts):
        self.in_channels = in_channels
        self.out_channels = out_channels
        super().__init__(in_channels // n_parts, out_channels // n_parts, 3)


class LinearPart(L.Linear):
    def __init__(self, in_size, n_parts):
        self.in_size = in_size
        super().__init__(in_size // n_parts, 5)


def test_sizes_of_a_subclass():
    assert (Part(8, 6, 2).in_channels, Part(8, 6, 2).W.shape) == (8, (3, 4, 3, 3))
    assert (LinearPart(8, 2).in_size, LinearPart(8, 2).W.shape) == (8, (5, 4))


def test_sizes_of_links():
    link = L.Convolution2D(3, 4, 1)
    link.__init__(5, 6, 1)
    assert (link.in_channels, link.W.shape) == (5, (6, 5, 1, 1))
    lazy = L.Linear(4)
    lazy(np.ones((1, 3), 'f'))
    assert (lazy.in_size, lazy.W.shape) == (L.Linear(None, 4).in_size, (4, 3))
    assert isinstance(chainer.Sequential(link)[0], L.Convolution2D)
