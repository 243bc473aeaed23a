"""Chainer's own CUDA kernels compile for sm_90, on a machine without a GPU.

NVRTC compiles; nothing runs. ``tox -e kernels-cupy13`` and ``kernels-cupy14`` install what it
takes.
"""

import ast
import contextlib
import importlib
import itertools
import pathlib

import numpy as np
import nvrtc
import pytest

cupy = pytest.importorskip('cupy', reason='needs CuPy, whose NVRTC compiles')

import chainer  # noqa: E402
from chainer.backends import cuda  # noqa: E402

from chainer_compat.patching import registry  # noqa: E402

pytestmark = [pytest.mark.mpi_skip, pytest.mark.limit(600)]

@pytest.fixture(scope='module')
def compiler():
    """Return a function that compiles CUDA source as CuPy would for an H100."""
    return nvrtc.compiler()


NDARRAY, INDEXER, SCALAR = 1, 2, 3  # as in cupy/_core/_kernel.pxd


def source(kernel, arguments):
    """Return the CUDA source that CuPy makes of an elementwise kernel for such arguments."""
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
    """Lets Chainer's GPU functions run on NumPy arrays; gives the source of their kernels."""
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


def grad_of_negative_sampling():
    from chainer.functions.loss.negative_sampling import NegativeSamplingFunctionGrad

    x, samples = np.zeros((2, 2), 'e'), np.zeros((2, 2), 'i')
    mask = np.ones(2, '?')
    function = NegativeSamplingFunctionGrad('sum', mask, 1, samples, x)
    function.forward_gpu((x, x, x[0, 0]))


def gather_and_scatter():
    from chainer.training.updaters import multiprocess_parallel_updater as updater

    pointers, kinds, info = np.zeros(2, 'Q'), np.zeros(2, 'b'), np.zeros(3, 'i')
    updater._memcpy_gather()(pointers, kinds, info, size=4)
    updater._memcpy_scatter()(pointers, kinds, info, np.zeros(4, 'f'), size=4)


def columns():
    from chainer.utils import conv

    conv.im2col_gpu(Reduced((1, 1, 3, 3), 'f'), 1, 1, 1, 1, 0, 0)
    conv.col2im_gpu(Reduced((1, 1, 1, 1, 3, 3), 'f'), 1, 1, 0, 0, 3, 3)


def columns_of_volumes():
    from chainer.utils import conv_nd

    ones = 1, 1, 1
    conv_nd.im2col_nd_gpu(Reduced((1, 1, 3, 3, 3), 'f'), ones, ones, (0, 0, 0))
    conv_nd.col2im_nd_gpu(Reduced((1, 1, *ones, 3, 3, 3), 'f'), ones, (0, 0, 0), (3, 3, 3))


class Reduced(np.ndarray):
    def reduced_view(self):
        return self


PATCHED = {
    'chainer.functions.array.resize_images': grad_of_resize_images,
    'chainer.functions.loss.negative_sampling': grad_of_negative_sampling,
    'chainer.links.loss.hierarchical_softmax': grad_of_hierarchical_softmax,
    'chainer.training.updaters.multiprocess_parallel_updater': gather_and_scatter,
    'chainer.utils.conv': columns,
    'chainer.utils.conv_nd_kernel': columns_of_volumes,
}


@pytest.mark.parametrize('name', PATCHED)
def test_patched_kernels_compile(compiler, kernels, name):
    PATCHED[name]()
    assert kernels
    for code in kernels.values():
        compiler(code)


CHAINER = pathlib.Path(chainer.__file__).parent

# These functions refuse float16.
FLOAT32_ONLY = {
    'functions/pooling/roi_average_align_2d.py', 'functions/pooling/roi_max_align_2d.py',
}
# These compute with types of their own: of arguments, or of integers that stand for pointers.
SKIPPED = {'chainer.backends.cuda', 'chainer.gradient_check',
           'chainer.training.updaters.multiprocess_parallel_updater'}


def elementwise_calls(file):
    """Yield the arguments of each ``cuda.elementwise`` in a file of Chainer, as patched.

    Those that are put together while a function runs are left out.
    """
    name = '.'.join(['chainer', *file.relative_to(CHAINER).with_suffix('').parts])
    text = file.read_text()
    if 'elementwise(' not in text or name in SKIPPED:
        return
    for shim in registry.edits.get(name, ()):
        for old, new in shim().items():
            text = text.replace(old, new)
    names = vars(importlib.import_module(name))
    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith('elementwise'):
            with contextlib.suppress(NameError):
                yield (eval(ast.unparse(ast.List(call.args)), names),
                       {k.arg: eval(ast.unparse(k.value), names) for k in call.keywords})


FILES = [file for file in sorted(CHAINER.rglob('*.py')) if any(elementwise_calls(file))]


def possible_arguments(kernel, dtype):
    """Yield arrays for ``kernel``: T is ``dtype``, and other types are tried until one fits.

    Optimizers compute in T, which is float32, and P is the type of a parameter.
    """
    params = kernel.params[:-1]
    letters = sorted({p.ctype for p in params if p.dtype is None} - {'T'})
    kinds = [['i', dtype, 'l', '?']] * len(letters)
    if any(p.ctype == 'P' and p.name == 'param' for p in params):
        kinds, dtype = [[dtype]] * len(letters), 'f'
    for ndim in (1, 2, 3, 4):
        for types in itertools.product(*kinds):
            given = dict(zip(letters, types, strict=True)) | {'T': dtype}
            yield [np.zeros((1,) * ndim, p.dtype or given[p.ctype]) for p in params]


@pytest.mark.parametrize('dtype', ['e', 'f'])
@pytest.mark.parametrize('file', FILES, ids=lambda f: f.relative_to(CHAINER).as_posix())
def test_every_elementwise_kernel_compiles(compiler, file, dtype):
    from cupy.cuda.compiler import CompileException

    if dtype == 'e' and file.relative_to(CHAINER).as_posix() in FLOAT32_ONLY:
        pytest.skip('refuses float16')
    for args, options in elementwise_calls(file):
        kernel = cupy.ElementwiseKernel(*args, **options)
        for arguments in possible_arguments(kernel, dtype):
            try:
                compiler(source(kernel, arguments))
                break
            except CompileException as e:
                error = e
        else:
            raise AssertionError(f'{kernel.name} does not compile') from error
