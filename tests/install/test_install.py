"""The install command of README.md, in new environments: with every installer and Python.

Installs from the package index, hence only in ``tox -e install``.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

pytestmark = [
    pytest.mark.mpi_skip,
    pytest.mark.limit(600),
    pytest.mark.skipif('CHAINERMN_TEST_INSTALL' not in os.environ, reason='run tox -e install'),
]

ROOT = pathlib.Path(__file__).parents[2]
NAMES = ['3.10', '3.11', '3.12', '3.13', '3.14', '3.15']
INSTALLERS = ['pip 23.2', 'pip', 'uv']
#: The oldest pip that we promise, and the last four releases.
PIPS = ['pip 23.2', 'pip 26.0.1', 'pip 26.1.2', 'pip 26.2.1', 'pip 26.3']

ALLREDUCE = """
import chainer, chainermn, numpy
comm = chainermn.create_communicator('naive')
assert comm.size == 2
assert comm.allreduce(numpy.ones(3)).tolist() == [2, 2, 2]
if comm.rank == 0:
    print('reduced')
"""


class Environment:
    """A new virtual environment, with one of the installers; commands run in its folder."""

    def __init__(self, folder: pathlib.Path, installer: str, python: str = sys.executable) -> None:
        self.folder = folder
        self.bin = folder / 'bin'
        # Constraints must not be necessary, nor may a cached wheel of Chainer hide that it cannot
        # be built.
        drop = ('PIP_CONSTRAINT', 'PIP_BUILD_CONSTRAINT', 'UV_BUILD_CONSTRAINT', 'CHAINER',
                'PYTHON', 'VIRTUAL_ENV')
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
        self.env['PATH'] = f'{self.bin}{os.pathsep}{self.env["PATH"]}'
        self.env['VIRTUAL_ENV'] = str(folder)  # uv installs there
        for name in ('PIP_CACHE_DIR', 'UV_CACHE_DIR'):
            self.env[name] = str(folder.with_name(f'{folder.name}-{name.lower()}'))
        self.env['UV_PYTHON_DOWNLOADS'] = 'never'
        run(['uv', 'venv', '-q', '-p', python, str(folder)], ROOT, self.env)
        if installer == 'uv':
            self.pip = ['uv', 'pip']
        else:
            run(['uv', 'pip', 'install', installer.replace(' ', '==')], ROOT, self.env)
            self.pip = [str(self.bin / 'python'), '-m', 'pip', '--disable-pip-version-check']

    def install(self, *targets: str, **env: str) -> None:
        """Install as README.md says."""
        run([*self.pip, 'install', *targets], self.folder, self.env | env)

    def install_chainer(self, *options: str) -> None:
        """Install Chainer from its source distribution, which needs a constraint."""
        constraint = self.folder / 'constraint.txt'
        constraint.write_text('setuptools<70')
        names = 'PIP_CONSTRAINT', 'PIP_BUILD_CONSTRAINT', 'UV_BUILD_CONSTRAINT'
        self.install(*options, 'chainer==7.8.1', **dict.fromkeys(names, str(constraint)))

    def uninstall(self, name: str) -> None:
        yes = [] if self.pip[0] == 'uv' else ['-y']
        run([*self.pip, 'uninstall', *yes, name], self.folder, self.env)

    def python(self, code: str, *options: str, cwd: pathlib.Path | str = '/', **env: str) -> str:
        command = [str(self.bin / 'python'), '-W', 'error', *options, '-c', code]
        return run(command, cwd, self.env | env)

    def chainermn(self, **kwargs: str) -> str:
        """Return 'ours' or 'old': the chainermn that this environment imports."""
        code = 'import chainer, chainermn; print(chainermn.__version__)'
        version = self.python(code, **kwargs)
        return {'8': 'ours', '7': 'old'}[version[0]]

    def chainer(self) -> str:
        """Return the folder in site-packages that contains the imported Chainer."""
        path = pathlib.Path(self.python('import chainer; print(chainer.__file__)'))
        return path.relative_to(self.site_packages()).parts[0]

    def allreduce(self) -> str:
        command = ['mpiexec', '-n', '2', 'python', '-W', 'error', '-c', ALLREDUCE]
        return run(command, '/', self.env)

    def site_packages(self) -> pathlib.Path:
        return next(self.folder.glob('lib/python3.*/site-packages'))


def run(command: list[str], cwd: pathlib.Path | str, env: dict[str, str]) -> str:
    result = subprocess.run(
        command, cwd=cwd, env=env, text=True, capture_output=True, check=False
    )
    assert result.returncode == 0, f'{command}\n{result.stdout}\n{result.stderr}'
    return result.stdout.strip()


def pythons(names: list[str]) -> dict[str, str]:
    """Return the Pythons of this machine: '3.12' -> path."""
    found = {}
    pyenv = pathlib.Path(os.environ.get('PYENV_ROOT', '~/.pyenv')).expanduser()
    for name in names:
        this = [sys.executable] if sys.version.startswith(name + '.') else []
        candidates = [*this, shutil.which(f'python{name}'),
                      *map(str, pyenv.glob(f'versions/{name}.*/bin/python'))]
        for python in filter(None, candidates):
            code = 'import sys; print(sys.version)'
            said = subprocess.run([python, '-c', code], capture_output=True, text=True, check=False)
            if said.stdout.startswith(name + '.'):
                found[name] = python
                break
    return found


PYTHONS = pythons(NAMES)


def new_environment(folder, installer, name):
    if name not in PYTHONS:
        pytest.skip(f'there is no Python {name} here')
    if (installer, name) == ('pip 23.2', '3.15'):
        pytest.skip('pip 23.2 itself fails with Python 3.15, whatever it installs')
    return Environment(folder, installer, PYTHONS[name])


@pytest.mark.parametrize('installer', PIPS)
@pytest.mark.parametrize('name', NAMES)
def test_every_pip_builds(tmp_path, name, installer):
    env = new_environment(tmp_path / 'env', installer, name)
    env.install('--no-deps', str(ROOT))
    assert (env.site_packages() / 'chainer-7.8.1/chainer/__init__.py').exists()


@pytest.mark.parametrize('installer', INSTALLERS)
@pytest.mark.parametrize('name', NAMES)
def test_one_command(tmp_path, name, installer):
    env = new_environment(tmp_path / 'env', installer, name)
    env.install(f'{ROOT}[mpich]')
    assert env.chainermn() == 'ours'
    assert env.chainermn(cwd=ROOT) == 'ours'
    assert env.chainermn(CHAINERMN_OVERLAY='0') == 'old'
    assert env.allreduce() == 'reduced'
    assert env.python('from importlib.metadata import version; print(version("chainer"))') == (
        '7.8.1')
    run([*env.pip, 'check'], tmp_path, env.env)
    report = json.loads(run(['mpiexec', '-n', '2', 'chainermn', 'check', '--json'], tmp_path,
                            env.env))
    assert report['passed'] and report['size'] == 2


@pytest.mark.parametrize('name', ['3.10', '3.11', '3.12'])
def test_numpy_1(tmp_path, name):
    env = new_environment(tmp_path / 'env', 'uv', name)
    env.install(f'{ROOT}[mpich]', 'numpy<2')
    assert env.python('import numpy; print(numpy.__version__)').startswith('1.26.')
    assert env.chainermn() == 'ours'
    assert env.chainermn(CHAINERMN_OVERLAY='0') == 'old'
    assert env.allreduce() == 'reduced'


@pytest.mark.parametrize('editable', [False, True])
@pytest.mark.parametrize('name', ['3.7', '3.8', '3.9'])
def test_an_older_python_is_refused(tmp_path, name, editable):
    """By pip, with its own message, and its own version."""
    python = pythons([name]).get(name)
    if python is None:
        pytest.skip(f'there is no Python {name} here')
    env = {k: v for k, v in os.environ.items() if not k.startswith(('PYTHON', 'PIP_CONSTRAINT'))}
    run([python, '-m', 'venv', str(tmp_path / 'env')], tmp_path, env)
    done = subprocess.run(
        [str(tmp_path / 'env/bin/python'), '-m', 'pip', 'install', '--no-deps',
         *['-e'] * editable, str(ROOT)], cwd=tmp_path, env=env, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode != 0
    assert f"Package 'chainermn' requires a different Python: {name}." in done.stdout
    assert 'Traceback' not in done.stdout


@pytest.mark.parametrize('editable', [False, True])
@pytest.mark.parametrize('installer', INSTALLERS)
def test_reinstall_and_uninstall(tmp_path, installer, editable):
    target = [*['-e'] * editable, f'{ROOT}[mpich]']
    env = Environment(tmp_path / 'env', installer)
    env.install(*target)
    assert env.chainermn() == env.chainermn(cwd=tmp_path) == 'ours'
    child = 'import chainermn; print(chainermn.__version__)'
    code = f'import subprocess, sys; subprocess.run([sys.executable, "-c", {child!r}])'
    assert env.python(code).startswith('8.')
    assert env.chainermn(CHAINERMN_OVERLAY='0') == 'old'
    assert not (ROOT / 'build').exists()
    assert not (ROOT / 'chainermn.egg-info').exists()

    again = '--reinstall' if installer == 'uv' else '--force-reinstall'
    env.install(again, '--no-deps', *target)
    assert env.chainermn() == 'ours'
    assert env.chainer() == 'chainer-7.8.1'

    pth = env.site_packages() / 'chainer_compat.pth'
    lines = pth.read_text()
    env.uninstall('chainermn')
    assert not pth.exists()
    # Only compiled code of edited modules may be left, which pip does not know.
    folder = env.site_packages()
    left = [path for path in folder.rglob('*') if 'chainer' in str(path.relative_to(folder))]
    assert all(path.is_dir() or path.match('chainer_compat/__pycache__/chainer.*.pyc')
               for path in left), left
    assert not (env.bin / 'chainermn').exists()
    code = 'import importlib.util as u; print(*map(u.find_spec, ("chainer", "chainermn")))'
    assert env.python(code) == 'None None'
    pth.write_text(lines.replace(str(ROOT), ''))  # as if somebody removed the folders manually
    assert env.python('print("quiet")') == 'quiet'


@pytest.mark.parametrize('installer', INSTALLERS)
@pytest.mark.parametrize('first', ['chainer', 'ours'])
def test_chainer_from_another_package(tmp_path, installer, first):
    """A Chainer in site-packages takes precedence over ours, and stays as it is."""
    env = Environment(tmp_path / 'env', installer)
    again = '--reinstall' if installer == 'uv' else '--force-reinstall'
    if first == 'chainer':
        env.install_chainer()
        env.install(f'{ROOT}[mpich]')
    else:
        env.install(f'{ROOT}[mpich]')
        env.install_chainer('--no-deps', again)
    assert env.chainer() == 'chainer'
    assert env.chainermn() == 'ours'
    assert env.chainermn(CHAINERMN_OVERLAY='0') == 'old'
    assert env.allreduce() == 'reduced'
    env.uninstall('chainermn')
    assert 'site-packages/chainermn/' in env.python(
        'import importlib.util as u; print(u.find_spec("chainermn").origin)')
    env.install(f'{ROOT}[mpich]')
    assert env.chainermn() == 'ours'


@pytest.mark.parametrize('installer', ['pip 23.2', 'pip'])
def test_pip_knows_the_chainer_that_we_install(tmp_path, installer):
    """So packages that require Chainer can be installed."""
    env = Environment(tmp_path / 'env', installer)
    env.install(str(ROOT))
    env.install('--no-index', 'chainer>=7')
    assert env.chainer() == 'chainer-7.8.1'


def test_uv_add(tmp_path):
    env = Environment(tmp_path / '.venv', 'uv')
    (tmp_path / 'pyproject.toml').write_text(
        '[project]\nname = "project"\nversion = "1"\nrequires-python = ">=3.10"\n')
    run(['uv', 'add', f'{ROOT}[mpich]'], tmp_path, env.env)
    assert env.chainermn() == 'ours'
    assert env.allreduce() == 'reduced'


@pytest.mark.parametrize('installer', INSTALLERS)
def test_folder_of_wheels(tmp_path, installer):
    """For machines without access to a package index."""
    wheels = str(tmp_path / 'wheels')
    builder = Environment(tmp_path / 'builder', 'pip')
    run([*builder.pip, 'wheel', '-w', wheels, f'{ROOT}[mpich]'], tmp_path, builder.env)
    env = Environment(tmp_path / 'env', installer)
    env.install('--no-index', '--find-links', wheels, 'chainermn[mpich]')
    assert env.chainermn() == 'ours'
    assert env.allreduce() == 'reduced'


def test_demo(tmp_path):
    env = Environment(tmp_path / 'env', 'uv')
    env.install(f'{ROOT}[mpich,examples]')
    out = run([str(env.bin / 'chainermn'), 'demo', '-n', '2', '--epoch', '6'], tmp_path, env.env)
    assert 'Validation accuracy: 9' in out.splitlines()[-1]
    assert (tmp_path / 'result' / 'loss.png').exists()


@pytest.mark.parametrize('installer', ['pip', 'uv'])
def test_environment_of_the_build(tmp_path, installer):
    """These variables would make the pip that builds Chainer fail."""
    constraint = tmp_path / 'constraint.txt'
    constraint.write_text('setuptools<70')
    env = Environment(tmp_path / 'env', installer)
    env.install('--no-deps', str(ROOT), PIP_BUILD_CONSTRAINT=str(constraint),
                UV_BUILD_CONSTRAINT=str(constraint),
                **({'PIP_PYTHON': '/usr/bin/python3'} if installer == 'uv' else {}))
    assert (env.site_packages() / 'chainer-7.8.1/chainer/__init__.py').exists()


@pytest.mark.parametrize('setuptools, advice', [
    ('setuptools<70', 'set environment variables for pip, such as PIP_INDEX_URL'),
    ('setuptools>=80', "Install without the option --no-build-isolation, or run "
                       "`python -m pip install pip 'setuptools<70' wheel` first."),
])
def test_a_build_that_fails_says_what_to_do(tmp_path, setuptools, advice):
    env = Environment(tmp_path / 'env', 'pip')
    env.install(setuptools, 'wheel')
    offline = env.env | {'PIP_NO_INDEX': '1', 'PIP_FIND_LINKS': '', 'PIP_CONFIG_FILE': '/dev/null'}
    done = subprocess.run(
        [*env.pip, 'install', '--no-build-isolation', '--no-deps', str(ROOT)], cwd=tmp_path,
        env=offline, text=True, capture_output=True, check=False)
    assert done.returncode != 0
    line, = re.findall('Chainer 7.8.1 was not built. .*', done.stdout + done.stderr)
    assert advice in line


#: What a user may write, for a strict type checker.
TYPED = '''
import numpy as np
import chainermn

comm: chainermn.CommunicatorBase = chainermn.create_communicator('naive')
total = comm.allreduce(np.ones(3, np.float32))
rank: int = comm.rank


def main(n: int) -> None:
    comm.barrier()
    part = chainermn.scatter_dataset(list(range(n)) if rank == 0 else None, comm)
    print(len(part), comm.allreduce_obj(n), total)


main(10)
'''


def test_wheel(tmp_path):
    """What is in it, and that a type checker sees the types."""
    env = Environment(tmp_path / 'env', 'uv')
    run(['uv', 'build', '--wheel', '-o', str(tmp_path), '.'], ROOT, env.env)
    wheel, = tmp_path.glob('chainermn-*.whl')
    names = zipfile.ZipFile(wheel).namelist()
    ours = {name for name in names if name.startswith('chainer_compat/_overlay/chainermn/')}
    there = {f'chainer_compat/_overlay/{path.relative_to(ROOT)}'
             for path in (ROOT / 'chainermn').rglob('*.py')}
    overlay = 'chainer_compat/_overlay/chainermn'
    assert ours == there | {f'{overlay}/py.typed', f'{overlay}/_commands/demo/train_mnist.py'}
    assert 'chainer_compat.pth' in names
    rest = {name.partition('/')[0] for name in set(names) - ours}
    assert rest == {'chainer-7.8.1', 'chainer_compat', 'chainer_compat.pth',
                    wheel.name.removesuffix('-py3-none-any.whl') + '.dist-info'}
    licenses = [name for name in names if name.endswith('LICENSE')]
    assert len(licenses) == 2 and 'chainer-7.8.1/chainer-7.8.1.dist-info/LICENSE' in licenses

    env.install(f'{wheel}[mpich]', 'mypy')
    script = tmp_path / 'script.py'
    script.write_text(TYPED)
    run([str(env.bin / 'python'), str(script)], tmp_path, env.env)
    run([str(env.bin / 'mypy'), '--strict', 'script.py'], tmp_path, env.env)
    script.write_text(TYPED + 'word: str = comm.rank\n')
    wrong = subprocess.run([str(env.bin / 'mypy'), '--strict', 'script.py'], cwd=tmp_path,
                           env=env.env, text=True, capture_output=True, check=False)
    assert 'expression has type "int", variable has type "str"' in wrong.stdout


def test_an_editable_build_does_not_empty_the_next_wheel(tmp_path):
    env = Environment(tmp_path / 'env', 'uv')
    env.install('pip', 'setuptools<70', 'wheel')
    code = ('import sys; sys.path.insert(0, "."); import build_backend as build; '
            f'build.build_editable({str(tmp_path)!r}); build.build_wheel({str(tmp_path)!r})')
    env.python(code, '-W', 'default', cwd=ROOT)
    wheel, = tmp_path.glob('chainermn-*.whl')
    assert 'chainer_compat/_overlay/chainermn/__init__.py' in zipfile.ZipFile(wheel).namelist()


def test_source_distribution(tmp_path):
    env = Environment(tmp_path / 'env', 'uv')
    run(['uv', 'build', '--sdist', '-o', str(tmp_path)], ROOT, env.env)
    shutil.rmtree(ROOT / 'chainermn.egg-info', ignore_errors=True)
    env.install(f'{next(tmp_path.glob("chainermn-*.tar.gz"))}[mpich]')
    assert env.chainermn() == 'ours'
    assert env.allreduce() == 'reduced'


def test_gpu_tests_without_a_network(tmp_path):
    """All are skipped, since this environment has no CuPy."""
    env = Environment(tmp_path / 'env', 'pip')
    env.install('numpy')
    folder = tmp_path / 'offline'
    output = run([sys.executable, 'tests/gpu/offline.py', str(folder), '--python',
                  f'{sys.version_info.major}.{sys.version_info.minor}'], ROOT,
                 env.env)
    assert re.fullmatch(r'.*: \d+ wheels, [\d.]+ MB', output)
    env.env['PIP_INDEX_URL'] = 'http://127.0.0.1:9'  # no server
    output = run(['sh', f'{folder}/run.sh'], ROOT, env.env)
    assert 'all tests will be skipped' in output
    assert len(re.findall(r'^=+ \d+ skipped', output, re.MULTILINE)) == 2
    assert run(['sh', f'{folder}/run.sh', 'echo', 'done'], ROOT, env.env) == 'done'
