"""Values of environment variables."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from jobs import run_job

import chainermn
from chainer_compat.patching.variables import KNOWN
from chainermn._process import environment

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize('value, expected', [
    ('0', False), ('false', False), ('No', False), ('OFF', False), (' 0 ', False),
    ('1', True), ('true', True), ('yes', True), ('On', True)])
def test_flags(monkeypatch, value, expected):
    monkeypatch.setenv(environment.DEBUG, value)
    for default in (False, True):
        assert environment.flag(environment.DEBUG, default) == expected


CREATE = '\n'.join(['import chainermn'] + 2 * ["chainermn.create_communicator('naive')"])

INVALID = ('flase', '2x', 'none')


@pytest.mark.parametrize('value', INVALID)
@pytest.mark.parametrize('name', environment.FLAGS)
def test_other_values_are_errors(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} is '{value}'. Use 1, true, yes or on; 0, false"):
        environment.check_flags()
    for default in (False, True):
        assert environment.flag(name, default) == default


def test_a_job_reports_a_misspelled_value(tmp_path):
    done = run_job(tmp_path, CREATE, CHAINERMN_DEADLOCKS='flase')
    assert done.returncode != 0
    assert "CHAINERMN_DEADLOCKS is 'flase'. Use 1, true" in done.stdout


def test_run_reports_a_misspelled_value(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text('')
    done = subprocess.run(
        [sys.executable, '-m', 'chainermn', 'run', '-n', '1', script], capture_output=True,
        text=True, check=False, env={**os.environ, 'CHAINERMN_HOST_LINKS': 'ye'})
    assert done.returncode == 2 and "CHAINERMN_HOST_LINKS is 'ye'. Use 1, true" in done.stderr


@pytest.mark.parametrize('default', [False, True])
def test_unset_or_empty_is_the_default(monkeypatch, default):
    monkeypatch.delenv(environment.DEBUG, raising=False)
    assert environment.flag(environment.DEBUG, default) == default
    monkeypatch.setenv(environment.DEBUG, '')
    assert environment.flag(environment.DEBUG, default) == default
    assert environment.text(environment.DEBUG) == ''


def variables(folder, *patterns):
    """The names of variables in files."""
    return {name for pattern in patterns for path in folder.rglob(pattern)
            for name in re.findall(r'\bCHAINERMN_[A-Z_]+[A-Z]\b', path.read_text('utf-8'))}


def test_all_variables_are_known():
    package = pathlib.Path(chainermn.__file__).parent
    assert variables(package, '*.py') <= environment.KNOWN
    page = variables(pathlib.Path(__file__).parents[2] / 'docs/reference', 'environment.md')
    internal = {environment.RUN_FOLDER, environment.RUN_LINK, environment.RUN_RANKS}
    assert page - environment.KNOWN == set()
    assert environment.KNOWN - page - internal == {'CHAINERMN_FORCE_ABORT_ON_EXCEPTION'}


@pytest.mark.parametrize('name, nearest', [
    ('TIMOUT', 'TIMEOUT'), ('TIME_OUT', 'TIMEOUT'), ('DEADLOCK', 'DEADLOCKS'),
    ('METRIC', 'METRICS'), ('STALL_WARN', 'STALL_WARNING'), ('debug', 'DEBUG'),
    ('RECORDS', 'RECORD'), ('ROOT', None), ('DATA', None), ('VERSION', None)])
def test_the_nearest_name(monkeypatch, name, nearest):
    monkeypatch.setattr(os, 'environ', {f'CHAINERMN_{name}': '1', 'CHAINER_TIMOUT': '1'})
    assert environment.unknown() == {
        f'CHAINERMN_{name}': nearest and f'CHAINERMN_{nearest}'}


@pytest.mark.parametrize('name, nearest', [
    ('USE_TROCH', 'USE_TORCH'), ('FUSED_UPDATE', 'FUSED_UPDATES'), ('COMPAT_NAME', 'COMPAT_NAMES'),
    ('use_torch', 'USE_TORCH'), ('COMPATT', 'COMPAT')])
def test_names_that_closely_resemble_one_of_chainer_compat(monkeypatch, name, nearest):
    monkeypatch.setattr(os, 'environ', {f'CHAINER_{name}': '1'})
    assert environment.unknown() == {f'CHAINER_{name}': f'CHAINER_{nearest}'}


def test_variables_of_chainer_and_chainer_compat_are_not_unknown(monkeypatch):
    names = {'CHAINER_CUDNN', 'CHAINER_DTYPE', 'CHAINER_DEBUG', 'CHAINER_TYPE_CHECK',
             'CHAINER_SEED', 'CHAINER_USE_CUDNN', 'CHAINER_USE_IDEEP',
             'CHAINER_KEEP_GRAPH_ON_REPORT',
             'CHAINER_CUDNN_DETERMINISTIC', 'CHAINER_WARN_NONDETERMINISTIC', 'CHAINER_COMPUTE_MODE',
             'CHAINER_BUILD_CHAINERX', 'CHAINER_DATASET_ROOT', 'CHAINER_TEST_GPU_LIMIT'}
    for package in ('chainer', 'chainer_compat'):
        folder, = importlib.util.find_spec(package).submodule_search_locations
        for path in pathlib.Path(folder).rglob('*.py'):
            if '_overlay' not in path.parts:
                names |= {*re.findall(r"'(CHAINER_[A-Z_]+[A-Z])['=]", path.read_text('utf-8'))}
    assert names > KNOWN
    monkeypatch.setattr(os, 'environ', dict.fromkeys(names, '1'))
    assert environment.unknown() == {}


def test_one_rank_warns_of_unknown_variables_once(tmp_path):
    done = run_job(tmp_path, CREATE, CHAINERMN_TIMOUT='60', CHAINERMN_DATA='/data',
                   CHAINERMN_RECORD_DETAILS='1')
    assert done.stdout == (
        'chainermn: warning: the environment variable CHAINERMN_DATA is unknown and has no effect\n'
        'chainermn: warning: the environment variable CHAINERMN_TIMOUT is unknown and has no '
        'effect; did you mean CHAINERMN_TIMEOUT?\n'
        'chainermn: warning: CHAINERMN_RECORD_DETAILS has no effect without CHAINERMN_RECORD\n')


def test_nobody_warns_of_known_variables(tmp_path):
    known = dict.fromkeys(environment.KNOWN - {
        environment.OVERLAY, environment.RUN_FOLDER, environment.RUN_LINK, environment.METRICS,
        environment.TIMELINE, environment.RECORD, environment.RECORD_DETAILS}, '1')
    assert run_job(tmp_path, CREATE, **known).stdout == ''


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
