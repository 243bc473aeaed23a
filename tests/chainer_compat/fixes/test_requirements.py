"""The part of pkg_resources that chainer.testing uses."""

from importlib import metadata

import pytest

from chainer_compat.fixes import requirements

pytestmark = pytest.mark.mpi_skip


@pytest.fixture
def installed(monkeypatch):
    versions = {'a': '2.0.0.post3', 'b': '1.10', 'c': '3.0rc1', 'd': '2.0.0.dev1+local'}

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, 'version', version)


@pytest.mark.parametrize('requirement', [
    'a', 'a>=2.0.0.post3, <2.1', 'a > 2', 'a!=2.0', 'a<2.1',
    'b>=1.2', 'b==1.10.0', 'b<=1.10,>1.9', 'b >= 1.2 , < 2',
    'c<3', 'c>2.9', 'c>=3.0b7', 'd<2.0', 'd>=2.0.0.dev0',
])
def test_met(installed, requirement):
    requirements.WorkingSet().require(requirement)


@pytest.mark.parametrize('requirement', [
    'a<2.0.0.post3', 'a==2.0.0', 'a>=2.1', 'b<1.9', 'b!=1.10', 'b>=1,<1.5', 'c>=3', 'd>=2.0',
])
def test_conflict(installed, requirement):
    with pytest.raises(requirements.VersionConflict, match='is installed'):
        requirements.WorkingSet().require('b', requirement)


def test_not_installed(installed):
    with pytest.raises(requirements.DistributionNotFound):
        requirements.WorkingSet().require('e>=1')


def test_unreadable(installed):
    with pytest.raises(ValueError, match='Cannot parse'):
        requirements.WorkingSet().require('a>=')
