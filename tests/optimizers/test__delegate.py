"""The proxy: what goes to the wrapped object, and what stays."""

import copy
import pickle

import pytest

from chainermn.optimizers._delegate import Delegate


class Quiet:
    default = 7

    def __init__(self):
        self.volume = 1
        self.words = ['a']

    @property
    def loudness(self):
        return self.volume * 10

    @loudness.setter
    def loudness(self, value):
        self.volume = value / 10

    def speak(self):
        return f'quiet at {self.volume}'

    def __len__(self):
        return 3


class Loud(Delegate, wraps='quiet'):
    quiet: Quiet
    extra: int

    def __init__(self, quiet, extra):
        super().__init__(quiet)
        self.extra = extra

    def speak(self):
        return self.quiet.speak().upper()


class Louder(Loud):
    more: int


@pytest.fixture
def quiet():
    return Quiet()


@pytest.fixture
def loud(quiet):
    return Loud(quiet, extra=5)


def test_writes_go_to_the_wrapped_object_through_its_properties(loud, quiet):
    loud.loudness = 50
    loud.new = 'n'
    assert quiet.volume == 5
    assert quiet.new == 'n'
    assert 'new' not in vars(loud)


def test_deletions_go_where_the_attribute_is(loud, quiet):
    del loud.volume
    assert not hasattr(quiet, 'volume')
    del loud.extra
    with pytest.raises(AttributeError, match="'Loud' object has no attribute 'extra'"):
        _ = loud.extra


def test_subclass_inherits_what_is_declared(quiet):
    louder = Louder(quiet, 1)
    louder.more = 2
    louder.extra = 3
    assert vars(quiet).keys() == {'volume', 'words'}
    assert (louder.more, louder.extra, louder.speak()) == (2, 3, 'QUIET AT 1')


def test_special_methods_are_not_forwarded(loud):
    assert not hasattr(loud, '__len__')
    with pytest.raises(TypeError):
        len(loud)


@pytest.mark.parametrize(
    'duplicate',
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
)
def test_copies_are_proxies_again(loud, duplicate):
    copied = duplicate(loud)
    assert type(copied) is Loud
    assert (copied.extra, copied.volume, copied.speak()) == (5, 1, 'QUIET AT 1')
    assert (copied.quiet is loud.quiet) == (duplicate is copy.copy)


def test_proxy_without_wrapped_object_does_not_recurse():
    empty = Loud.__new__(Loud)
    with pytest.raises(AttributeError, match="'Loud' object has no attribute 'quiet'"):
        _ = empty.anything
