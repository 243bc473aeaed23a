"""Values of environment variables."""

import os

import pytest

from chainermn._process import environment

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize('value, expected', [
    ('0', False), ('false', False), ('No', False), ('OFF', False), (' 0 ', False),
    ('1', True), ('true', True), ('yes', True), ('2', True)])
def test_flags(monkeypatch, value, expected):
    monkeypatch.setenv(environment.DEBUG, value)
    for default in (False, True):
        assert environment.flag(environment.DEBUG, default) == expected


@pytest.mark.parametrize('default', [False, True])
def test_unset_or_empty_is_the_default(monkeypatch, default):
    monkeypatch.delenv(environment.DEBUG, raising=False)
    assert environment.flag(environment.DEBUG, default) == default
    monkeypatch.setenv(environment.DEBUG, '')
    assert environment.flag(environment.DEBUG, default) == default
    assert environment.text(environment.DEBUG) == ''


def test_defaults_of_mpi(monkeypatch):
    for name in ('UCX_TLS', 'UCX_NET_DEVICES', 'UCX_WARN_UNUSED_ENV_VARS', 'UCX_TCP_KEEPINTVL'):
        monkeypatch.delenv(name, raising=False)
    environment.set_mpi_defaults()
    assert os.environ['UCX_TCP_KEEPINTVL'] == '10s'
    assert 'UCX_WARN_UNUSED_ENV_VARS' not in os.environ
    monkeypatch.setenv('UCX_TCP_KEEPINTVL', '3s')
    monkeypatch.setenv('UCX_TLS', '^tcp')
    environment.set_mpi_defaults()
    assert os.environ['UCX_TCP_KEEPINTVL'] == '3s'
    assert os.environ['UCX_WARN_UNUSED_ENV_VARS'] == 'n'
    monkeypatch.delenv('UCX_WARN_UNUSED_ENV_VARS')
