"""Builds a virtual GPU into the environment of this Python: ``python tests/virtual_gpu/build.py``.

CuPy's wheel then runs on the CPU. The CUDA libraries that it loads are stand-ins, compiled from the
folders ``cuda`` and ``libraries``. Two of CuPy's modules contain machine code from CUDA, so they
are rebuilt from CuPy's source; ``generator_api.py`` replaces a third one.

``tox -e virtual-gpu`` runs this and the tests. It needs g++ on x86-64 Linux, no root.

One kernel runs at a time, and the threads of a block take turns, so races between threads remain
hidden. All devices share one address space. cuSPARSE, cuDNN and precompiled device code (cub,
``cupy.random.default_rng``) are missing. Random numbers differ from those of CUDA.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time

HERE = pathlib.Path(__file__).parent
SITE = pathlib.Path(sysconfig.get_paths()['platlib'])
FOLDER = pathlib.Path(sys.prefix) / 'share' / 'virtual_gpu'  # output of the build
SUFFIX = sysconfig.get_config_var('EXT_SUFFIX')  # suffix of CuPy's modules
GCC = 12  # the oldest supported version of g++
FLAGS = ['-std=c++17', '-fPIC', '-fvisibility=hidden', '-w']


@dataclasses.dataclass(frozen=True)
class CuPy:
    """A version of CuPy's wheel for CUDA 12, and the versions that it was built with."""

    version: str
    cython: str
    cuda: int
    cython_options: tuple[str, ...] = ()
    #: Whether CuPy finds libraries in site-packages/nvidia. Otherwise, a module loads them.
    finds_libraries: bool = True
    variables: tuple[tuple[str, str], ...] = ()


VERSIONS = {
    '14': CuPy('14.2.0', '3.2.4', 12090, ('-X', 'freethreading_compatible=True')),
    # Without this variable, Chainer warns that cuDNN is missing.
    '13': CuPy('13.6.0', '3.0.12', 12000, finds_libraries=False,
               variables=(('CHAINER_CUDNN', '0'),)),
}
#: CUDA's headers, and OpenBLAS with LAPACK.
PACKAGES = ['nvidia-cuda-runtime-cu12==12.9.*', 'nvidia-cuda-nvcc-cu12==12.9.*', 'scipy-openblas32']
#: Packages with libraries that the stand-ins would replace.
CUDA_PACKAGES = ['cupy-cuda13x', 'nvidia-nccl-cu12', 'nvidia-cublas-cu12', 'nvidia-cuda-nvrtc-cu12']


@dataclasses.dataclass(frozen=True)
class Library:
    """A stand-in for a CUDA library."""

    prefix: str  # prefix of its functions
    soname: str
    sources: str | None = None  # a pattern
    unsupported: int = 0  # what a missing function returns
    openblas: bool = False
    folder: str | None = None  # in site-packages/nvidia, where CuPy looks; default: the prefix


CUDA = Library('cuda', 'libcuda.so.1', 'cuda/*.cpp', 801)  # cudaErrorNotSupported
LIBRARIES = [
    Library('nvrtc', 'libnvrtc.so.12', 'libraries/nvrtc.cpp', folder='cuda_nvrtc'),
    Library('cublas', 'libcublas.so.12', 'libraries/cublas_*.cpp', 15, openblas=True),
    Library('curand', 'libcurand.so.10', 'libraries/curand.cpp', 204),
    Library('nccl', 'libnccl.so.2', 'libraries/nccl.cpp', 5),
    Library('cusolver', 'libcusolver.so.11', 'libraries/cusolver*.cpp', 9, openblas=True),
    Library('cusparse', 'libcusparse.so.12', unsupported=10),
    Library('cufft', 'libcufft.so.11', 'libraries/cufft.cpp', 16),
    # These libraries are loaded, but not called.
    Library('cublasLt', 'libcublasLt.so.12', folder='cublas'),
    Library('nvJitLink', 'libnvJitLink.so.12', folder='nvjitlink'),
]
#: CuPy's modules that are rebuilt, and the sources that replace their machine code.
MODULES = {'cupy_backends/cuda/api/runtime': None, 'cupy/cuda/thrust': 'libraries/thrust.cpp'}


def run(*command: object, env: dict[str, str] | None = None, cwd: object = None) -> str:
    """Run a command; return its output. Exit if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=cwd)
    if done.returncode != 0:
        sys.exit(f'{" ".join(words)}\n{done.stdout}{done.stderr}')
    return done.stdout


def pip(*arguments: str, **env: str) -> None:
    """Run this Python's pip with additional environment variables."""
    run(sys.executable, '-m', 'pip', '--disable-pip-version-check', '--quiet', *arguments,
        env=os.environ | env)


def is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def install(cupy: CuPy) -> None:
    """Install CuPy's wheel and the packages needed to build it."""
    others = [name for name in CUDA_PACKAGES if is_installed(name)]
    if others:
        sys.exit(f'This environment has {", ".join(others)}. Use one without CUDA.')
    pip('install', f'cupy-cuda12x=={cupy.version}', f'Cython=={cupy.cython}', *PACKAGES)


def download_source(cupy: CuPy) -> pathlib.Path:
    """Return the folder with CuPy's source, which is only downloaded once."""
    source = FOLDER / f'cupy-{cupy.version}'
    if not source.exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            # These variables let CuPy's setup.py run without CUDA.
            pip('download', '--no-deps', '--no-binary', 'cupy', '--dest', folder,
                f'cupy=={cupy.version}',
                READTHEDOCS='True', CUPY_INSTALL_USE_STUB='1', CUPY_INSTALL_NO_CUDA='1')
            archive, = pathlib.Path(folder).glob('*.tar.gz')
            with tarfile.open(archive) as tar:
                tar.extractall(folder)
            (pathlib.Path(folder) / source.name).rename(source)
    return source


def replace(path: pathlib.Path, make: object) -> None:
    """Replace a file by the result of ``make``. Running processes keep using the old file."""
    new = path.with_name(f'{path.name}.{os.getpid()}.new')
    make(new)
    new.replace(path)


def link(path: pathlib.Path, target: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, lambda new: new.symlink_to(target))


class Build:
    """Compiles files that are older than their sources."""

    def __init__(self, cupy: CuPy, workers: concurrent.futures.Executor) -> None:
        self.cupy = cupy
        self.workers = workers
        self.source = download_source(cupy)
        self.objects = FOLDER / f'objects-{cupy.version}'
        self.objects.mkdir(exist_ok=True)
        openblas = pathlib.Path(importlib.util.find_spec('scipy_openblas32').origin).parent
        includes = [HERE / 'build_include', SITE / 'nvidia/cuda_runtime/include',
                    SITE / 'nvidia/cuda_nvcc/include', openblas / 'include']
        self.includes = [f'-I{folder}' for folder in includes]
        self.cuda = [f'-L{FOLDER}', f'-l:{CUDA.soname}', f'-Wl,-rpath,{FOLDER}']
        self.openblas = [f'-L{openblas / "lib"}', '-lscipy_openblas',
                         f'-Wl,-rpath,{openblas / "lib"}']
        self.newest_header = max(path.stat().st_mtime for path in HERE.rglob('*.h'))

    def compile(self, source: pathlib.Path, *options: object) -> pathlib.Path:
        """Return an object file of a source."""
        output = self.objects / f'{source.parent.name}-{source.stem}.o'
        newest = source.stat().st_mtime
        if source.is_relative_to(HERE):
            newest = max(newest, self.newest_header)
        if not output.exists() or output.stat().st_mtime < newest:
            replace(output, lambda new: run('g++', '-O1', '-c', *FLAGS, *self.includes, *options,
                                            '-o', new, source))
        return output

    def compile_all(self, pattern: str | None) -> list[pathlib.Path]:
        sources = sorted(HERE.glob(pattern)) if pattern else []
        return list(self.workers.map(self.compile, sources))

    def compile_module(self, name: str) -> pathlib.Path:
        """Return an object file of one of CuPy's modules."""
        generated = self.objects / f'{name.replace("/", ".")}.cpp'
        if not generated.exists():
            constants = (f'CUPY_CUDA_VERSION={self.cupy.cuda},CUPY_HIP_VERSION=0,'
                         'CUPY_USE_CUDA_PYTHON=False,CUPY_CUFFT_STATIC=False')
            with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
                new = pathlib.Path(folder) / generated.name
                run(sys.executable, '-m', 'cython', '-3', '--cplus', '-X', 'embedsignature=True',
                    '-X', 'binding=False', '-X', 'c_api_binop_methods=True',
                    *self.cupy.cython_options, '-E', constants, f'{name}.pyx', '-o', new,
                    cwd=self.source)
                new.rename(generated)
        python = sysconfig.get_paths()['include']
        return self.compile(generated, f'-I{(self.source / name).parent}', f'-I{python}',
                            f'-I{self.source / "cupy_backends"}', f'-I{self.source}')

    def link_library(self, library: Library, objects: list[pathlib.Path], needed: set[str]) -> None:
        """Link a stand-in. Functions that it does not implement return an error."""
        lacking = sorted(needed - symbols('--defined-only', *objects))
        source = self.objects / f'{library.prefix}-lacking.cpp'
        replace(source, lambda new: new.write_text('#include <cstdio>\n' + ''.join(
            f'extern "C" __attribute__((visibility("default"))) int {name}() {{\n'
            f'  fprintf(stderr, "vgpu: {name} is not supported\\n");\n'
            f'  return {library.unsupported};\n}}\n' for name in lacking)))
        # CuPy's modules ask for versioned symbols.
        versions = self.objects / f'{library.prefix}.versions'
        versions.write_text(f'{library.soname} {{ global: {library.prefix}*; local: *; }};')
        options = [f'-Wl,-soname,{library.soname}']
        if library is not CUDA:
            options += [f'-Wl,--version-script,{versions}', *self.cuda]
        options += self.openblas if library.openblas else []
        replace(FOLDER / library.soname,
                lambda new: run('g++', '-shared', *objects, self.compile(source), '-o', new,
                                *options))

    def link_module(self, name: str, objects: list[pathlib.Path]) -> None:
        options = [] if self.cupy.finds_libraries else [
            '-Wl,--no-as-needed', *(f'-l:{library.soname}' for library in LIBRARIES)]
        replace(SITE / f'{name}{SUFFIX}',
                lambda new: run('g++', '-shared', *objects, '-o', new, *self.cuda, *options))

    def all(self) -> None:
        modules = {name: self.workers.submit(self.compile_module, name) for name in MODULES}
        objects = {library: self.compile_all(library.sources) for library in [CUDA, *LIBRARIES]}
        replaced = {name: self.compile_all(source) for name, source in MODULES.items()}
        modules = {name: [module.result(), *replaced[name]] for name, module in modules.items()}

        all_modules = [path for module in modules.values() for path in module]
        used = symbols('--undefined-only', *all_modules)
        self.link_library(CUDA, objects[CUDA], starting_with(CUDA.prefix, used))
        wheel = [*SITE.glob(f'cupy*/**/*{SUFFIX}')]
        used = symbols('--dynamic', '--undefined-only', *wheel)
        list(self.workers.map(
            lambda library: self.link_library(library, objects[library],
                                              starting_with(library.prefix, used)), LIBRARIES))
        for name, module in modules.items():
            self.link_module(name, module)


def symbols(*arguments: object) -> set[str]:
    """Return names of symbols in object files or libraries."""
    if not any(isinstance(argument, pathlib.Path) for argument in arguments):
        return set()
    lines = run('nm', '--format=posix', *arguments).splitlines()
    return {line.split()[0].partition('@')[0] for line in lines if not line.endswith(':')}


def starting_with(prefix: str, names: set[str]) -> set[str]:
    return {name for name in names
            if name.startswith(prefix) and name[len(prefix):][:1].isupper()}


def put_in_place(cupy: CuPy) -> None:
    """Put the libraries and a module where CuPy finds them, and set the variables they need."""
    for library in LIBRARIES:
        folder = SITE / 'nvidia' / (library.folder or library.prefix) / 'lib'
        link(folder / library.soname, FOLDER / library.soname)
    link(SITE / 'nvidia/cuda_runtime/lib/libcudart.so.12', FOLDER / CUDA.soname)
    link(FOLDER / 'kernel_include', HERE / 'kernel_include')

    module = SITE / 'cupy/random/_generator_api'
    module.with_name(module.name + SUFFIX).unlink(missing_ok=True)
    shutil.copy(HERE / 'generator_api.py', module.with_suffix('.py'))

    # Compiled kernels must not get into the cache of a real GPU, and must not outlive the headers.
    headers = sorted([*HERE.glob('kernel_include/**/*.h'), HERE / 'libraries/nvrtc.cpp'])
    key = hashlib.sha256(b''.join(path.read_bytes() for path in headers)).hexdigest()[:16]
    cache = FOLDER / f'kernels-{key}'
    if not cache.exists():
        for old in [*FOLDER.glob('kernels-*'), FOLDER / 'precompiled', FOLDER / 'compiled']:
            shutil.rmtree(old, ignore_errors=True)
    cache.mkdir(exist_ok=True)
    variables = {'CUPY_CACHE_DIR': str(cache),
                 'CUPY_ACCELERATORS': '',  # cub is compiled device code
                 **dict(cupy.variables)}
    (SITE / 'virtual_gpu.pth').write_text('import os; ' + '; '.join(
        f'os.environ.setdefault({name!r}, {value!r})' for name, value in variables.items()) + '\n')


def why_not() -> str:
    """Return why the virtual GPU cannot be built here, or ''."""
    if (sys.platform, platform.machine()) != ('linux', 'x86_64'):
        return 'needs Linux on x86-64'
    if not shutil.which('g++') or int(run('g++', '-dumpversion').partition('.')[0]) < GCC:
        return f'needs g++ {GCC} or later'
    return ''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--cupy', choices=VERSIONS, default='14', help='default: %(default)s')
    cupy = VERSIONS[parser.parse_args().cupy]
    if reason := why_not():
        sys.exit(f'The virtual GPU {reason}.')
    if sys.prefix == sys.base_prefix:
        sys.exit('Use a virtual environment: this replaces parts of CuPy.')
    start = time.monotonic()
    FOLDER.mkdir(parents=True, exist_ok=True)
    install(cupy)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        Build(cupy, workers).all()
    put_in_place(cupy)
    names = run(sys.executable, '-c', 'import cupy; print(cupy.cuda.runtime.getDeviceProperties(0)'
                                      '["name"].decode(), float(cupy.arange(4).sum()))')
    print(f'{names.strip()}: CuPy {cupy.version} works, after {time.monotonic() - start:.0f} s')


if __name__ == '__main__':
    main()
