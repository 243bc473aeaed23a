"""Chainer's own CUDA kernels compile for sm_90, on a machine without a GPU.

NVRTC compiles; nothing runs.  ``tox -e kernels-cupy13`` and ``kernels-cupy14`` install what it
takes.
"""

import ctypes
import importlib
import pathlib
import sys

import numpy as np
import pytest

cupy = pytest.importorskip('cupy', reason='needs CuPy, whose NVRTC compiles')

from chainer.backends import cuda  # noqa: E402

from chainer_compat import _mend  # noqa: E402

pytestmark = [pytest.mark.mpi_skip, pytest.mark.limit(600)]

CUPY_14 = int(cupy.__version__.split('.')[0]) >= 14


def load_nvrtc():
    """Loads NVRTC from NVIDIA's wheel where CuPy would not look for it."""
    for folder in sys.path:
        for library in sorted(pathlib.Path(folder, 'nvidia').glob('*/lib/libnvrtc.so.*')):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


@pytest.fixture(scope='module')
def compiler():
    """Returns a function that compiles CUDA source as CuPy would for an H100."""
    from cupy._core import core
    from cupy.cuda import compiler

    load_nvrtc()
    try:
        options = core.assemble_cupy_compiler_options(())
    except RuntimeError as error:
        pytest.skip(f'CuPy has no NVRTC: {error}')
    if hasattr(compiler, '_get_extra_include_dir_opts'):  # CuPy 13
        options += compiler._get_extra_include_dir_opts()
    headers = ''.join(f'#include <{header}>\n' for header in core._cupy_header_list)

    def compile_for_h100(source):
        with pytest.MonkeyPatch.context() as monkeypatch:
            # Without this it would ask the device what it can do.
            monkeypatch.setattr(compiler, '_get_arch_for_options_for_nvrtc',
                                lambda arch: (f'-arch=sm_{arch}', 'cubin'))
            cubin, _ = compiler.compile_using_nvrtc(headers + source, options, arch='90')
        assert cubin.startswith(b'\x7fELF')

    return compile_for_h100


NDARRAY, INDEXER, SCALAR = 1, 2, 3  # as in cupy/_core/_kernel.pxd


def source(kernel, arguments):
    """Returns the CUDA source that CuPy makes of an elementwise kernel for such arguments."""
    from cupy._core import _carray, _kernel, _scalar

    given = list(zip(kernel.params[:-1], arguments, strict=True))  # the last is CuPy's indexer
    types = {p.ctype: x.dtype.type for p, x in given if p.dtype is None}
    types |= {p.ctype: x.dtype.type for p, x in given if p.dtype is None and x.ndim}
    infos = [
        # CuPy makes what is not raw one-dimensional, if it is contiguous.
        _kernel._ArgInfo(NDARRAY, cupy.ndarray, x.dtype.type, x.ndim if p.raw else 1, True, True)
        if isinstance(x, np.ndarray) else
        _kernel._ArgInfo(SCALAR, _scalar.CScalar, p.dtype or types[p.ctype], 0, True, True)
        for p, x in given
    ]
    infos.append(_kernel._ArgInfo(INDEXER, _carray.Indexer, None, 1, True, True))
    return _kernel._get_elementwise_kernel_code(
        tuple(infos), _kernel._TypeMap(tuple(sorted(types.items()))), kernel.params,
        kernel.operation, kernel.name, kernel.preamble,
        **{name: kernel.kwargs.get(name, '') for name in ('loop_prep', 'after_loop')})


@pytest.fixture
def kernels(monkeypatch):
    """Lets GPU functions of Chainer run on NumPy arrays; gives the source of their kernels."""
    sources = {}

    class Elementwise:
        def __init__(self, *args, **options):
            self.kernel = cupy.ElementwiseKernel(*args, **options)

        def __call__(self, *args, size=None):
            args = [x if isinstance(x, np.ndarray) else np.asarray(x)[()] for x in args]
            shape = (size,) if size is not None else np.broadcast_shapes(*(
                x.shape for x, p in zip(args, self.kernel.params, strict=False)
                if isinstance(x, np.ndarray) and not p.raw))
            types = {p.ctype: x.dtype for x, p in zip(args, self.kernel.params, strict=False)
                     if isinstance(x, np.ndarray)}
            outs = [np.ones(shape, p.dtype or types[p.ctype])
                    for p in self.kernel.out_params[len(args) - self.kernel.nin:]]
            args += outs
            types = ' '.join(sorted({str(x.dtype) for x in args if isinstance(x, np.ndarray)}))
            sources[f'{self.kernel.name} {types}'] = source(self.kernel, args)
            return outs[0] if len(outs) == 1 else tuple(outs)

    monkeypatch.setattr(cuda, 'elementwise', Elementwise)
    monkeypatch.setattr(cuda, 'cupy', np)
    return sources


def grad_of_resize_images():
    from chainer.functions.array import resize_images

    x = np.zeros((1, 1, 2, 2), 'e')
    index = np.zeros((2, 2), 'l')
    resize_images.interpolate_grad_bilinear_gpu(x, index, index, x[0, 0], x[0, 0], 2, 2)


def grad_of_hierarchical_softmax():
    from chainer.links.loss import hierarchical_softmax

    function = object.__new__(hierarchical_softmax.BinaryHierarchicalSoftmaxFunction)
    function.max_length = 2
    function.begins = function.paths = np.zeros(3, 'i')
    x = function.codes = function.wxy = np.zeros(4, 'e')
    function.backward_gpu((x.reshape(2, 2), function.paths, x.reshape(2, 2)), (x[:1],))


def gather_and_scatter():
    from chainer.training.updaters import multiprocess_parallel_updater as updater

    pointers, kinds, info = np.zeros(2, 'Q'), np.zeros(2, 'b'), np.zeros(3, 'i')
    updater._memcpy_gather()(pointers, kinds, info, size=4)
    updater._memcpy_scatter()(pointers, kinds, info, np.zeros(4, 'f'), size=4)


MENDED = {
    'chainer.functions.array.resize_images': grad_of_resize_images,
    'chainer.links.loss.hierarchical_softmax': grad_of_hierarchical_softmax,
    'chainer.training.updaters.multiprocess_parallel_updater': gather_and_scatter,
}


@pytest.mark.parametrize('name', MENDED)
def test_mended_kernels_compile(compiler, kernels, name):
    MENDED[name]()
    assert kernels
    for code in kernels.values():
        compiler(code)


@pytest.mark.parametrize('name', MENDED)
def test_kernels_that_are_not_mended_do_not_compile_on_cupy_14(
        compiler, kernels, monkeypatch, name):
    from cupy.cuda.compiler import CompileException

    module = importlib.import_module(name)
    try:
        with monkeypatch.context() as context:
            context.setitem(_mend.edits, name, [])
            importlib.reload(module)
        MENDED[name]()
    finally:
        importlib.reload(module)
    for code in kernels.values():
        if CUPY_14:
            with pytest.raises(CompileException, match=r'atomicAdd|float16|complete'):
                compiler(code)
        else:
            compiler(code)
