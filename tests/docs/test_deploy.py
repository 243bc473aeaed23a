"""The Kubernetes manifest has the expected structure; it has not been run."""

import pathlib
import re
import shlex

import pytest

pytestmark = pytest.mark.mpi_skip

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def spec():
    yaml = pytest.importorskip('yaml')
    job = yaml.safe_load((ROOT / 'deploy/mpijob.yaml').read_text())
    assert (job['apiVersion'], job['kind']) == ('kubeflow.org/v2beta1', 'MPIJob')
    return job['spec']


def test_there_are_as_many_ranks_as_slots(spec):
    launcher, worker = (spec['mpiReplicaSpecs'][name] for name in ('Launcher', 'Worker'))
    command = launcher['template']['spec']['containers'][0]['command']
    assert command[:2] == ['mpiexec', '-n']
    assert int(command[2]) == worker['replicas'] * spec['slotsPerWorker']
    assert worker['template']['spec']['containers'][0]['resources']['limits']['cpu'] >= (
        spec['slotsPerWorker'])


def test_volumes_and_environment(spec):
    for replica in spec['mpiReplicaSpecs'].values():
        pod = replica['template']['spec']
        volumes = {volume['name'] for volume in pod.get('volumes', ())}
        for container in pod['containers']:
            assert {mount['name'] for mount in container.get('volumeMounts', ())} <= volumes
            # Kubernetes only takes texts.
            assert all(isinstance(each['value'], str) for each in container.get('env', ()))
            assert all(isinstance(each, str) for each in container['command'])


def test_the_files_of_the_image_exist(spec):
    dockerfile = (ROOT / 'deploy/Dockerfile').read_text()
    used = re.findall(r'/opt/chainermn/([-\w./]+)', dockerfile)
    used += [word.removeprefix('/opt/chainermn/')
             for word in spec['mpiReplicaSpecs']['Launcher']['template']['spec']['containers'][0][
                 'command'] if word.startswith('/opt/chainermn/')]
    assert len(used) == 1
    assert all((ROOT / path).exists() for path in used)


def test_the_image_starts_what_the_manifest_needs():
    lines = (ROOT / 'deploy/Dockerfile').read_text().replace('\\\n', ' ').splitlines()
    instructions = [line for line in lines if line and not line.lstrip().startswith('#')]
    assert instructions[0].startswith('FROM ')
    assert {line.split()[0] for line in instructions} == {'FROM', 'RUN', 'COPY'}
    for line in instructions:
        assert shlex.split(line)  # quotes are closed
    assert 'openssh-server' in instructions[1]
