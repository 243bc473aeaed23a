"""The table of pieces, and the kernels: compiled for the host and run; compiled for a GPU."""

import itertools

import numpy as np
import pytest

from chainermn.communicators import _batched_copy

pytestmark = pytest.mark.mpi_skip

LENGTH = _batched_copy.LENGTH


@pytest.fixture(scope='module', params=[2, 4, 8])
def kernels(request, compile_kernels):
    """Runs a kernel on the host: ``run(name, pieces, buffer, scale)``."""
    kernel = compile_kernels(_batched_copy.source(request.param))

    def run(name, pieces, buffer, scale=1.):
        assert buffer.itemsize == request.param
        kernel(name, len(pieces), 7, pieces, buffer, scale)

    run.dtype = np.dtype(f'f{request.param}')
    return run


def arrays_of_all_kinds(numbers):
    """Arrays of all three dtypes: empty, single, about one piece long, and of several pieces."""
    shapes = [(0,), (), (3, 5), (LENGTH - 1,), (LENGTH,), (LENGTH + 1,), (2, LENGTH), (1,)]
    arrays = []
    for shape, dtype in itertools.product(shapes, ['f2', 'f4', 'f8']):
        array = np.empty(shape, dtype)
        array[...] = numbers(array.size).reshape(shape)
        arrays.append(array)
    return arrays


def pieces_of(arrays):
    starts = itertools.accumulate((x.size for x in arrays), initial=0)
    return _batched_copy.pieces(tuple(
        (x.ctypes.data, start, x.size, x.itemsize)
        for start, x in zip(starts, arrays, strict=False)))


def halves(size):
    """Numbers that no dtype has to round, but no two neighbours alike."""
    return np.arange(size) % 1000 / 4 - 50


def test_pack(kernels):
    arrays = arrays_of_all_kinds(halves)
    buffer = np.full(sum(x.size for x in arrays), np.nan, kernels.dtype)
    kernels('pack', pieces_of(arrays), buffer)
    np.testing.assert_array_equal(buffer, np.concatenate([x.ravel() for x in arrays]))


def test_unpack(kernels):
    arrays = arrays_of_all_kinds(lambda size: np.full(size, np.nan))
    buffer = halves(sum(x.size for x in arrays)).astype(kernels.dtype)
    kernels('unpack', pieces_of(arrays), buffer, 1 / 3)
    wide = np.promote_types(buffer.dtype, 'f4').type
    expected = buffer.astype(wide) * wide(1 / 3)
    starts = itertools.accumulate(x.size for x in arrays)
    for x, y in zip(arrays, np.split(expected, list(starts)), strict=False):
        if x.itemsize == 2:  # the host has no direct way from double to float16
            y = y.astype('f4')
        np.testing.assert_array_equal(x, y.astype(x.dtype).reshape(x.shape))


def test_rounding(kernels):
    x = np.random.RandomState(0).standard_normal(1000).astype('f4')
    x[:4] = np.inf, -np.inf, np.nan, 1e30
    buffer = np.empty(1000, kernels.dtype)
    kernels('pack', pieces_of([x]), buffer)
    with np.errstate(over='ignore'):
        np.testing.assert_array_equal(buffer, x.astype(kernels.dtype))


def test_pieces_cover_everything_once():
    table = _batched_copy.pieces(((1 << 40, 5, 2 * LENGTH + 3, 4), (7, 0, 0, 8), (64, 0, 5, 2)))
    assert table.dtype == _batched_copy.PIECE
    assert table.tolist() == [
        (1 << 40, 5, LENGTH, 4),
        ((1 << 40) + 4 * LENGTH, 5 + LENGTH, LENGTH, 4),
        ((1 << 40) + 8 * LENGTH, 5 + 2 * LENGTH, 3, 4),
        (64, 0, 5, 2)]


def test_more_elements_than_an_int_holds():
    size = 2**31 + 1
    table = _batched_copy.pieces(((16, 0, size, 4), (1 << 46, size, 2, 8)))
    assert table['size'].sum() == size + 2
    assert (table['start'] == np.cumsum(table['size'], dtype=np.int64) - table['size']).all()
    assert table[-1].tolist() == (1 << 46, size, 2, 8)
    assert table[-2].tolist() == (16 + 4 * 2**31, 2**31, 1, 4)


def test_no_arrays():
    assert len(_batched_copy.pieces(())) == 0


@pytest.mark.parametrize('itemsize', [2, 4, 8])
def test_compiles_for_sm_90(itemsize, monkeypatch):
    pytest.importorskip('cupy', reason='needs CuPy, whose NVRTC compiles')
    from cupy._core import core
    from cupy.cuda import compiler

    try:
        options = core.assemble_cupy_compiler_options(())  # as RawModule does
    except RuntimeError as error:
        pytest.skip(f'CuPy has no NVRTC: {error}')
    if hasattr(compiler, '_get_extra_include_dir_opts'):  # CuPy 13
        options += compiler._get_extra_include_dir_opts()
    # Without this it would ask the device what it can do.
    monkeypatch.setattr(compiler, '_get_arch_for_options_for_nvrtc',
                        lambda arch: (f'-arch=sm_{arch}', 'cubin'))
    cubin, _ = compiler.compile_using_nvrtc(_batched_copy.source(itemsize), options, arch='90')
    assert cubin.startswith(b'\x7fELF')
    assert b'unpack' in cubin
