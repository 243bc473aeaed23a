"""The Kubernetes manifests fit the schemas of the operators, and the image; none has been run."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import typing

import pydantic
import pytest
import yaml
from time_limits import seconds

import chainermn
from chainermn.__main__ import main
from chainermn._commands import run

pytestmark = pytest.mark.mpi_skip

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / 'deploy/Dockerfile').read_text()

#: The fields of the MPI Operator's own objects (v2beta1). Pods are those of Kubernetes.
MPI_JOB = {'mpiImplementation', 'mpiReplicaSpecs', 'runPolicy', 'slotsPerWorker',
           'sshAuthMountPath', 'launcherCreationPolicy', 'runLauncherAsWorker'}
RUN_POLICY = {'activeDeadlineSeconds', 'backoffLimit', 'cleanPodPolicy', 'schedulingPolicy',
              'ttlSecondsAfterFinished', 'suspend', 'managedBy'}


def documents(name):
    return list(yaml.safe_load_all((ROOT / 'deploy' / name).read_text()))


@pytest.fixture
def mpi_job():
    job, = documents('mpijob.yaml')
    assert (job['apiVersion'], job['kind']) == ('kubeflow.org/v2beta1', 'MPIJob')
    return job['spec']


def pods(name):
    """Return the pods of a manifest by role, and the command of the launcher."""
    if name == 'mpijob.yaml':
        specs = documents(name)[0]['spec']['mpiReplicaSpecs']
        found = {role: spec['template']['spec'] for role, spec in specs.items()}
        return found, found['Launcher']['containers'][0]['command']
    runtime, job = documents(name)
    jobs = runtime['spec']['template']['spec']['replicatedJobs']
    found = {'Launcher' if each['name'] == 'launcher' else 'Worker':
             each['template']['spec']['template']['spec'] for each in jobs}
    return found, job['spec']['trainer']['command']


def test_the_mpi_job_has_the_fields_of_its_operator(mpi_job):
    assert set(mpi_job) <= MPI_JOB and set(mpi_job['runPolicy']) <= RUN_POLICY
    assert mpi_job['mpiImplementation'] in ('OpenMPI', 'Intel', 'MPICH')
    assert mpi_job['launcherCreationPolicy'] == 'WaitForWorkersReady'
    assert set(mpi_job['mpiReplicaSpecs']) == {'Launcher', 'Worker'}
    for spec in mpi_job['mpiReplicaSpecs'].values():
        assert set(spec) <= {'replicas', 'restartPolicy', 'template'}
        assert 'restartPolicy' not in spec['template']['spec']  # the operator overrides it


def faults(kind, value, where=''):
    """Yield the fields that a type of an OpenAPI client lacks; such a client ignores them."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is list and isinstance(value, list):
        for number, each in enumerate(value):
            yield from faults(inner[0], each, f'{where}[{number}]')
    elif typing.get_origin(kind) is dict and isinstance(value, dict):
        for key, each in value.items():
            yield from faults(inner[1], each, f'{where}.{key}')
    elif inner:  # Optional and Annotated
        for each in inner:
            yield from faults(each, value, where)
    elif isinstance(kind, type) and issubclass(kind, pydantic.BaseModel) and (
            isinstance(value, dict)):
        fields = {field.alias or name: field.annotation
                  for name, field in kind.model_fields.items()}
        for key, each in value.items():
            if key in fields:
                yield from faults(fields[key], each, f'{where}.{key}')
            else:
                yield f'{where}.{key}'


@pytest.mark.slow
def test_everything_fits_the_published_schemas():
    """Those of Kubeflow Trainer and of the pods of Kubernetes."""
    from kubeflow_trainer_api import models  # takes a second

    runtime, job = documents('trainjob.yaml')
    cases = [(models.TrainerV1alpha1TrainingRuntime, runtime),
             (models.TrainerV1alpha1TrainJob, job)]
    cases += [(models.IoK8sApiCoreV1PodSpec, pod)
              for name in ('mpijob.yaml', 'trainjob.yaml') for pod in pods(name)[0].values()]
    for model, value in cases:
        assert not list(faults(model, value))
        assert model.from_dict(value) is not None  # raises for a wrong type
    wrong = {**runtime, 'spec': {**runtime['spec'], 'mlPolicyy': {}}}
    assert set(faults(models.TrainerV1alpha1TrainingRuntime, wrong)) == {'.spec.mlPolicyy'}


@pytest.mark.parametrize('name', ['mpijob.yaml', 'trainjob.yaml'])
def test_there_are_as_many_ranks_as_slots(name):
    found, command = pods(name)
    assert command[:3] == ['chainermn', 'run', '-n']
    if name == 'mpijob.yaml':
        spec = documents(name)[0]['spec']
        nodes, slots = spec['mpiReplicaSpecs']['Worker']['replicas'], spec['slotsPerWorker']
    else:
        runtime, job = documents(name)
        nodes, slots = (job['spec']['trainer'][key] for key in ('numNodes', 'numProcPerNode'))
        policy = runtime['spec']['mlPolicy']
        assert (policy['numNodes'], policy['mpi']['numProcPerNode']) == (nodes, slots)
        assert policy['mpi']['mpiImplementation'] == 'OpenMPI'  # the only one that it supports
    assert int(command[3]) == nodes * slots
    assert int(found['Worker']['containers'][0]['resources']['limits']['cpu']) >= slots


@pytest.mark.parametrize('name', ['mpijob.yaml', 'trainjob.yaml'])
def test_pods_run_without_root_and_end_in_time(name):
    found, command = pods(name)
    grace = int(command[command.index('--grace') + 1])
    for pod in found.values():
        assert grace < pod['terminationGracePeriodSeconds'] <= grace + 10
        assert pod['securityContext']['runAsNonRoot']
        assert pod['securityContext']['runAsUser'] == 1000
        volumes = {volume['name'] for volume in pod.get('volumes', ())}
        for container in pod['containers']:
            assert container['securityContext']['allowPrivilegeEscalation'] is False
            assert set(container['resources']['limits']) >= {'cpu', 'memory'}
            assert {mount['name'] for mount in container.get('volumeMounts', ())} <= volumes
            # Kubernetes only takes texts.
            assert all(isinstance(each['value'], str) for each in container.get('env', ()))
            assert all(isinstance(each, str) for each in container.get('command', ()))
    worker = found['Worker']['containers'][0]
    assert worker['command'] == ['sshd.sh'] and 'bin/sshd.sh' in DOCKERFILE
    port = worker['readinessProbe']['tcpSocket']['port']
    assert DOCKERFILE.count(f"'Port {port}'") == 2  # of sshd, and of ssh
    assert {each['containerPort'] for each in worker['ports']} >= {port, 9400}
    assert worker['volumeMounts'][0]['mountPath'] == '/dev/shm'


@pytest.mark.parametrize('name', ['mpijob.yaml', 'trainjob.yaml'])
def test_images_have_a_tag(name):
    found, _ = pods(name)
    tags = {container['image'] for pod in found.values() for container in pod['containers']}
    if name == 'trainjob.yaml':
        tags.add(documents(name)[1]['spec']['trainer']['image'])
    tag, = tags
    version = chainermn.__version__.partition('.dev')[0]
    assert tag.removesuffix('-openmpi') == f'registry.example.com/chainermn:{version}'
    assert f' -t {tag} .' in DOCKERFILE  # the command that builds it


@pytest.mark.parametrize('name', ['mpijob.yaml', 'trainjob.yaml'])
def test_metrics_are_scraped(name):
    """By annotations, or by the PodMonitor; the ports are those that the processes open."""
    found, command = pods(name)
    monitor, = documents('monitoring/podmonitor.yaml')
    endpoint, = monitor['spec']['podMetricsEndpoints']
    assert endpoint['honorLabels'] is True
    opened = {'Launcher': command[command.index('--metrics') + 1], 'Worker': next(
        each['value'] for each in found['Launcher']['containers'][0]['env']
        if each['name'] == 'CHAINERMN_METRICS')}
    for role, meta in templates(name).items():
        port, = (each['containerPort'] for each in found[role]['containers'][0]['ports']
                 if each['name'] == endpoint['port'])
        assert opened[role] == f'0.0.0.0:{port}'
        assert meta['annotations'] == {'prometheus.io/scrape': 'true',
                                       'prometheus.io/port': str(port)}
        assert meta['labels'].items() >= monitor['spec']['selector']['matchLabels'].items()


def templates(name):
    """Return the metadata of the pods by role."""
    if name == 'mpijob.yaml':
        specs = documents(name)[0]['spec']['mpiReplicaSpecs']
        return {role: spec['template']['metadata'] for role, spec in specs.items()}
    jobs = documents(name)[0]['spec']['template']['spec']['replicatedJobs']
    return {'Launcher' if each['name'] == 'launcher' else 'Worker':
            each['template']['spec']['template']['metadata'] for each in jobs}


@pytest.mark.limit(180)
@pytest.mark.parametrize('name', [
    'mpijob.yaml', pytest.param('trainjob.yaml', marks=pytest.mark.slow)])
def test_the_job_resumes_in_new_pods(name, tmp_path):
    """All that the command writes is in a volume that outlives the pods and is shared by them."""
    found, command = pods(name)
    claim, = documents('storage.yaml')
    assert claim['kind'] == 'PersistentVolumeClaim'
    assert claim['spec']['accessModes'] == ['ReadWriteMany']
    worker = found['Worker']
    mounts = {each['mountPath']: each['name'] for each in worker['containers'][0]['volumeMounts']}
    volume, = (each for each in worker['volumes'] if each['name'] == mounts['/storage'])
    assert volume['persistentVolumeClaim']['claimName'] == claim['metadata']['name']
    script = command.index('/opt/chainermn/examples/sharded_data/train_sharded.py')
    storage, lines = tmp_path / 'storage', []
    program = [each.replace('/opt/chainermn', str(ROOT)).replace('/storage', str(storage))
               for each in command[script:]]
    for pod, iterations in (('first', 60), ('second', 70)):
        (tmp_path / pod).mkdir()  # nothing else survives
        done = run_pod(tmp_path / pod, [*program, '--iteration', str(iterations)])
        assert list((tmp_path / pod).iterdir()) == []
        lines += re.findall('Resumed from iteration (\\d+)', done.stdout + done.stderr)
        if pod == 'first':  # the pods are deleted before the end
            assert not lines and done.returncode != 0
    assert lines == ['50'] and done.returncode == 0, done.stderr


def run_pod(folder, program):
    """Run two ranks; those of the first pod are killed after the checkpoint of iteration 50."""
    kill = ("import os, signal, chainer\n"
            "update = chainer.training.StandardUpdater.update\n"
            "def killed(self):\n"
            "    update(self)\n"
            "    if self.iteration == 58:\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            "chainer.training.StandardUpdater.update = killed\n") * (folder.name == 'first')
    code = (f'import runpy, sys, chainermn\n{kill}del sys.argv[0]\n'
            "runpy.run_path(sys.argv[0], run_name='__main__')")
    return subprocess.run(['mpiexec', '-n', '2', sys.executable, '-c', code, *program], cwd=folder,
                          text=True, capture_output=True, check=False, timeout=seconds(80))


@pytest.mark.parametrize('name', ['mpijob.yaml', 'trainjob.yaml'])
def test_the_options_of_the_command_exist(name, tmp_path, monkeypatch):
    _, command = pods(name)
    seen = []
    monkeypatch.setattr(run, 'main', lambda parser, options: seen.append(options) or 0)
    assert main(command[1:]) == 0
    path = seen[0].script.removeprefix('/opt/chainermn/')
    assert (ROOT / path).exists() and seen[0].grace == 30


def steps():
    """Return the instructions of the Dockerfile."""
    lines = DOCKERFILE.replace('\\\n', ' ').splitlines()
    return [line.split(None, 1) for line in lines if line and not line.lstrip().startswith('#')]


def test_the_image():
    assert steps()[0] == ['FROM', 'debian:bookworm-slim']
    assert {name for name, _ in steps()} == {'FROM', 'RUN', 'ARG', 'COPY', 'ENV', 'USER', 'WORKDIR'}
    for _, text in steps():
        assert shlex.split(text)  # quotes are closed
    assert ['USER', '1000'] in steps() and 'ssh_host_*' in DOCKERFILE  # no host keys in the image
    ignored = (ROOT / '.dockerignore').read_text().split('\n')
    assert '.git' in ignored and 'tests' in ignored
    needed = re.findall(r'/opt/chainermn/([-\w./]+)', (ROOT / 'deploy/mpijob.yaml').read_text())
    assert not {path.partition('/')[0] for path in needed} & set(ignored)


@pytest.mark.full
@pytest.mark.limit(1800)
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which('debootstrap'),
                    reason='needs root, debootstrap and a network')
def test_the_steps_of_the_image_in_a_chroot(tmp_path):
    """Then chainermn check, sshd.sh and ssh as the user of the image."""
    root = pathlib.Path(os.environ.get('CHAINERMN_TEST_CHROOT') or tmp_path / 'root')
    if not root.exists():
        subprocess.run(['debootstrap', '--variant=minbase', 'bookworm', root], check=True)
    ignored = [line.rpartition('/')[2] for line in (
        ROOT / '.dockerignore').read_text().splitlines() if not line.startswith('#')]
    shutil.copytree(ROOT, root / 'opt/chainermn', dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns(*ignored))
    # Elsewhere, since a package that the image installs writes a file of certificates of its own.
    certificates = {'PIP_CERT': '/etc/pip-certificates.pem'} if 'PIP_CERT' in os.environ else {}
    for name, path in certificates.items():
        shutil.copy(os.environ[name], root / path[1:])
    for path in ('/etc/hosts', '/etc/resolv.conf', '/etc/pip.conf'):
        if pathlib.Path(path).exists():
            (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path[1:])

    def execute(command, *options):
        done = subprocess.run(
            ['chroot', *options, root, '/bin/sh', '-ec', command], text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={'MPI': 'mpich', 'HOME': '/home/mpiuser', 'DEBIAN_FRONTEND': 'noninteractive',
                 'PATH': '/opt/venv/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin',
                 **{name: value for name, value in os.environ.items() if name.startswith('PIP_')
                    and name != 'PIP_FIND_LINKS'}, **certificates})
        assert done.returncode == 0, done.stdout
        return done.stdout

    mounts = [('proc', 'proc', 'proc'), ('sysfs', 'sysfs', 'sys'), ('none', 'devpts', 'dev/pts'),
              ('none', 'tmpfs', 'dev/shm')]
    try:
        for device, kind, path in mounts:
            (root / path).mkdir(exist_ok=True)
            subprocess.run(['mount', '-t', kind, device, root / path], check=True)
        for name, text in steps():
            if name == 'RUN':
                execute(text)
        assert not list((root / 'etc/ssh').glob('ssh_host_*'))
        user = '--userspec=1000:1000'
        execute('mkdir -p ~/.ssh; rm -f ~/.ssh/*; ssh-keygen -q -N "" -f ~/.ssh/id_rsa; '
            'cp ~/.ssh/id_rsa.pub ~/.ssh/authorized_keys', user)
        assert 'All required checks passed' in execute('chainermn check', user)
        output = execute('mkdir -p /tmp/run; sshd.sh & pid=$!; '
                         'for i in $(seq 100); do ssh localhost true && break; sleep .2; done; '
                         'ssh localhost id; mpiexec -n 2 chainermn check; kill $pid', user)
        assert 'uid=1000' in output and 'All required checks passed' in output, output
    finally:
        for _, _, path in reversed(mounts):
            subprocess.run(['umount', '-l', root / path], check=False)
