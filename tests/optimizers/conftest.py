"""The communicators that most of these tests run with."""

import pytest

import chainermn


@pytest.fixture(scope='module', params=['naive', 'flat'])
def comm(request):
    comm = chainermn.create_communicator(request.param)
    yield comm
    comm.finalize()
