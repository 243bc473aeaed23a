"""Values of environment variables."""

import os

import pytest

from chainermn import _environment

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize('value, expected', [
    ('0', False), ('false', False), ('No', False), ('OFF', False), (' 0 ', False),
    ('1', True), ('true', True), ('yes', True), ('2', True)])
def test_flags(monkeypatch, value, expected):
    monkeypatch.setenv(_environment.DEBUG, value)
    for default in (False, True):
        assert _environment.flag(_environment.DEBUG, default) == expected


@pytest.mark.parametrize('default', [False, True])
def test_unset_or_empty_is_the_default(monkeypatch, default):
    monkeypatch.delenv(_environment.AGREE, raising=False)
    assert _environment.flag(_environment.AGREE, default) == default
    monkeypatch.setenv(_environment.AGREE, '')
    assert _environment.flag(_environment.AGREE, default) == default
    assert _environment.text(_environment.AGREE) == ''


def test_defaults_of_mpi(monkeypatch):
    for name in ('UCX_TLS', 'UCX_NET_DEVICES', 'UCX_WARN_UNUSED_ENV_VARS', 'UCX_TCP_KEEPINTVL'):
        monkeypatch.delenv(name, raising=False)
    _environment.set_mpi_defaults()
    assert os.environ['UCX_TCP_KEEPINTVL'] == '10s'
    assert 'UCX_WARN_UNUSED_ENV_VARS' not in os.environ
    monkeypatch.setenv('UCX_TCP_KEEPINTVL', '3s')
    monkeypatch.setenv('UCX_TLS', '^tcp')
    _environment.set_mpi_defaults()
    assert os.environ['UCX_TCP_KEEPINTVL'] == '3s'
    assert os.environ['UCX_WARN_UNUSED_ENV_VARS'] == 'n'
    monkeypatch.delenv('UCX_WARN_UNUSED_ENV_VARS')
