"""Every documented way to install, in new environments: ours wins, and goes without a trace.

Builds real environments from the package registry, hence only in ``tox -e install``.
"""

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
CONSTRAINTS = 'build-constraints.txt'

ALLREDUCE = """
import chainer, chainermn, numpy
comm = chainermn.create_communicator('naive')
assert comm.size == 2
assert comm.allreduce(numpy.ones(3)).tolist() == [2, 2, 2]
if comm.rank == 0:
    print('reduced')
"""


class Environment:
    """A new virtual environment, with one of the installers."""

    def __init__(self, folder: pathlib.Path, python: str, installer: str) -> None:
        self.folder = folder
        self.bin = folder / 'bin'
        # The constraints that tox sets must not help here.
        drop = ('PIP_CONSTRAINT', 'PIP_BUILD_CONSTRAINT', 'CHAINER', 'PYTHON', 'VIRTUAL_ENV')
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
        self.env['PATH'] = f'{self.bin}{os.pathsep}{self.env["PATH"]}'
        if installer == 'uv':
            run(['uv', 'venv', '-p', python, str(folder)], ROOT, self.env)
            self.env['VIRTUAL_ENV'] = str(folder)  # says where to install to
            self.pip = ['uv', 'pip']
            return
        run([python, '-m', 'venv', str(folder)], ROOT, self.env)
        self.pip = [str(self.bin / 'python'), '-m', 'pip', '--disable-pip-version-check']
        if installer == 'newest pip':
            run([*self.pip, 'install', '-U', 'pip'], ROOT, self.env)

    def install(self, *targets: str) -> None:
        """Installs as README.md says for this installer."""
        run([*self.pip, 'install', *self._constraint(), *targets], ROOT, self.env)

    def _constraint(self) -> list[str]:
        if self.pip[0] == 'uv':
            return []  # it reads pyproject.toml
        version = run([*self.pip, '--version'], ROOT, self.env).split()[1]
        if tuple(map(int, version.split('.')[:2])) >= (25, 3):
            return ['--build-constraint', CONSTRAINTS]
        self.env['PIP_CONSTRAINT'] = CONSTRAINTS
        return []

    def uninstall(self, name: str) -> None:
        yes = [] if self.pip[0] == 'uv' else ['-y']
        run([*self.pip, 'uninstall', *yes, name], ROOT, self.env)

    def python(self, code: str, *options: str, cwd: pathlib.Path | str = '/', **env: str) -> str:
        command = [str(self.bin / 'python'), '-W', 'error', *options, '-c', code]
        return run(command, cwd, self.env | env)

    def chainermn(self, **kwargs: str) -> str:
        """Returns 'ours' or 'old': the chainermn that this environment imports."""
        code = 'import chainer, chainermn; print(chainermn.__version__)'
        version = self.python(code, **kwargs)
        return {'8': 'ours', '7': 'old'}[version[0]]

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


def pythons() -> dict[str, str]:
    """Returns the supported Pythons of this machine: '3.12' -> path."""
    found = {}
    pyenv = pathlib.Path(os.environ.get('PYENV_ROOT', '~/.pyenv')).expanduser()
    for name in ['3.10', '3.11', '3.12', '3.13']:
        this = [sys.executable] if sys.version.startswith(name + '.') else []
        candidates = [*this, shutil.which(f'python{name}'),
                      *map(str, pyenv.glob(f'versions/{name}.*/bin/python'))]
        for python in filter(None, candidates):
            code = 'import sys, ensurepip; print(sys.version)'
            said = subprocess.run([python, '-c', code], capture_output=True, text=True, check=False)
            if said.stdout.startswith(name + '.'):
                found[name] = python
                break
    return found


THIS = f'{sys.version_info.major}.{sys.version_info.minor}'
PYTHONS = pythons()


@pytest.mark.parametrize('target', ['.[mpich]', '-e.[mpich]'])
@pytest.mark.parametrize('installer', ['pip', 'newest pip', 'uv'])
def test_install(tmp_path, installer, target):
    if installer != 'uv' and THIS not in PYTHONS:
        pytest.skip('this Python has no ensurepip')
    env = Environment(tmp_path / 'env', sys.executable, installer)
    env.install(target)

    assert env.chainermn() == 'ours'
    assert env.chainermn(cwd=ROOT) == 'ours'
    assert env.chainermn(cwd=tmp_path) == 'ours'
    assert env.allreduce() == 'reduced'
    child = 'import chainermn; print(chainermn.__version__)'
    code = f'import subprocess, sys; subprocess.run([sys.executable, "-c", {child!r}])'
    assert env.python(code).startswith('8.')

    assert env.chainermn(CHAINERMN_OVERLAY='0') == 'old'
    assert env.chainermn() == 'ours'
    assert not (ROOT / 'build').exists()
    assert not (ROOT / 'chainermn.egg-info').exists()

    again = ['--reinstall'] if installer == 'uv' else ['--force-reinstall']
    env.install(*again, '--no-deps', 'chainer==7.8.1')
    assert env.chainermn() == 'ours'
    env.install(*again, '--no-deps', target)
    assert env.chainermn() == 'ours'

    pth = env.site_packages() / 'chainer_compat.pth'
    line = pth.read_text()
    env.uninstall('chainermn')
    assert not pth.exists()
    assert not list(env.site_packages().glob('chainer_compat*'))
    assert 'site-packages/chainermn/' in env.python(
        'import importlib.util as u; print(u.find_spec("chainermn").origin)')
    pth.write_text(line.replace(str(ROOT), ''))  # as if somebody removed the folder by hand
    assert env.python('print("quiet")') == 'quiet'


def test_chainer_first(tmp_path):
    env = Environment(tmp_path / 'env', sys.executable, 'uv')
    env.install('chainer==7.8.1')
    env.install('.[mpich]')
    assert env.chainermn() == 'ours'


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
    env = Environment(tmp_path / 'env', sys.executable, 'uv')
    run(['uv', 'build', '--wheel', '-o', str(tmp_path), '.'], ROOT, env.env)
    wheel, = tmp_path.glob('chainermn-*.whl')
    names = zipfile.ZipFile(wheel).namelist()
    ours = {name for name in names if name.startswith('chainer_compat/_overlay/chainermn/')}
    there = {f'chainer_compat/_overlay/{path.relative_to(ROOT)}'
             for path in (ROOT / 'chainermn').rglob('*.py')}
    assert ours == there | {'chainer_compat/_overlay/chainermn/py.typed'}
    assert 'chainer_compat.pth' in names
    rest = {name.partition('/')[0] for name in set(names) - ours}
    assert rest == {'chainer_compat', 'chainer_compat.pth', next(
        name.partition('/')[0] for name in names if '.dist-info/' in name)}
    assert any(name.endswith('LICENSE') for name in names)

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
    env = Environment(tmp_path / 'env', sys.executable, 'uv')
    env.install('setuptools<70', 'wheel')
    code = ('import sys; sys.path.insert(0, "."); import build_backend as build; '
            f'build.build_editable({str(tmp_path)!r}); build.build_wheel({str(tmp_path)!r})')
    env.python(code, '-W', 'default', cwd=ROOT)
    wheel, = tmp_path.glob('chainermn-*.whl')
    assert 'chainer_compat/_overlay/chainermn/__init__.py' in zipfile.ZipFile(wheel).namelist()


def test_source_distribution(tmp_path):
    env = Environment(tmp_path / 'env', sys.executable, 'uv')
    run(['uv', 'build', '--sdist', '-o', str(tmp_path)], ROOT, env.env)
    shutil.rmtree(ROOT / 'chainermn.egg-info', ignore_errors=True)
    env.install(f'{next(tmp_path.glob("chainermn-*.tar.gz"))}[mpich]')
    assert env.chainermn() == 'ours'
    assert env.allreduce() == 'reduced'


@pytest.mark.parametrize('name', ['3.10', '3.11', '3.12', '3.13'])
def test_python(tmp_path, name):
    if name not in PYTHONS:
        pytest.skip(f'there is no Python {name} here')
    env = Environment(tmp_path / 'env', PYTHONS[name], 'pip')
    env.install('.[mpich]')
    assert env.chainermn() == 'ours'
    assert env.allreduce() == 'reduced'
    if name != '3.13':
        env.install('numpy<2')
        assert env.python('import numpy; print(numpy.__version__)').startswith('1.26.')
        assert env.chainermn() == 'ours'
        assert env.chainermn(CHAINERMN_OVERLAY='0') == 'old'
        assert env.allreduce() == 'reduced'


def test_gpu_tests_without_a_network(tmp_path):
    """All are skipped, since this environment has no CuPy."""
    if THIS not in PYTHONS:
        pytest.skip('this Python has no ensurepip')
    env = Environment(tmp_path / 'env', sys.executable, 'pip')
    env.install('numpy')
    folder = tmp_path / 'offline'
    output = run([sys.executable, 'tests/gpu/offline.py', str(folder), '--python', THIS], ROOT,
                 env.env)
    assert re.fullmatch(r'.*: \d+ wheels, [\d.]+ MB', output)
    env.env['PIP_INDEX_URL'] = 'http://127.0.0.1:9'  # no server
    output = run(['sh', f'{folder}/run.sh'], ROOT, env.env)
    assert 'all tests will be skipped' in output
    assert len(re.findall(r'^=+ \d+ skipped', output, re.MULTILINE)) == 2
    assert run(['sh', f'{folder}/run.sh', 'echo', 'done'], ROOT, env.env) == 'done'
