"""Errors that explain a mistake lose the frames of this package; one rank prints a common one."""
import traceback

import pytest

import chainermn
from chainermn._operations import common_error


def raise_internally():
    """Raise an error from a function of this package."""
    chainermn.datasets.scatter_index(-1, None)


def caught(function):
    try:
        function()
    except Exception as error:
        return error


def frames(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize('debug, is_marked', [('0', True), ('', False), ('1', True), ('1', False)])
def test_frames_of_this_package_are_hidden(monkeypatch, debug, is_marked):
    monkeypatch.setenv('CHAINERMN_DEBUG', debug)
    error = caught(raise_internally)
    if is_marked:
        common_error.mark(error, is_printed_here=True)
    before = frames(error)
    assert before[:2] == ['caught', 'raise_internally'] and len(before) > 2
    common_error.hide_frames(error)
    assert frames(error) == (before if debug == '1' else before[:2])


def test_frames_stay_if_it_could_be_a_mistake_of_this_package():
    error = caught(lambda: common_error.mark(None, is_printed_here=True))
    before = frames(error)
    assert before[-1] == 'mark'
    common_error.hide_frames(error)
    assert frames(error) == before


def test_frames_stay_if_all_are_internal():
    error = caught(raise_internally)
    common_error.mark(error, is_printed_here=False)
    error.__traceback__ = error.__traceback__.tb_next.tb_next
    before = frames(error)
    assert before
    common_error.hide_frames(error)
    assert frames(error) == before


def test_other_errors_are_printed_by_their_rank():
    error = ValueError()
    assert not common_error.is_common(error) and not common_error.is_common(None)
    assert common_error.is_printed_here(error)
    for value in False, True:
        common_error.mark(error, is_printed_here=value)
        assert common_error.is_common(error)
        assert common_error.is_printed_here(error) is value
