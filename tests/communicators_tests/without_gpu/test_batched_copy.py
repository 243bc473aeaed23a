"""The table of pieces, and the kernels: compiled for the host and run; compiled for a GPU."""

import ctypes
import itertools
import pathlib
import re
import sys

import numpy as np
import pytest

from chainermn._transport import batched_copy

pytestmark = pytest.mark.mpi_skip

LENGTH = batched_copy.LENGTH


@pytest.fixture(scope='module', params=[2, 4, 8])
def kernels(request, compile_kernels):
    """Runs a kernel on the host: ``run(name, pieces, buffer, scale)``."""
    kernel = compile_kernels(batched_copy.source(request.param))

    def run(name, pieces, buffer, scale=1.):
        assert buffer.itemsize == request.param
        kernel(name, len(pieces), 7, pieces, buffer, scale)

    run.dtype = np.dtype(f'f{request.param}')
    return run


def arrays_of_all_kinds(numbers):
    """Arrays of all three dtypes: empty, single, about one piece long, and of several pieces.

    Some begin at a multiple of 16 bytes, some do not.
    """
    shapes = [(0,), (), (3, 5), (LENGTH - 1,), (LENGTH,), (LENGTH + 1,), (2, LENGTH), (1,)]
    arrays = []
    for shape, dtype, shift in itertools.product(shapes, ['f2', 'f4', 'f8'], [0, 1]):
        size = int(np.prod(shape))
        memory = np.empty(size + 16, dtype)
        start = -memory.ctypes.data % 16 // memory.itemsize + shift
        array = memory[start:start + size].reshape(shape)
        array[...] = numbers(size).reshape(shape)
        assert not size or (array.ctypes.data % 16 == 0) == (shift == 0)
        arrays.append(array)
    return arrays


def pieces_of(arrays):
    starts = itertools.accumulate((x.size for x in arrays), initial=0)
    return batched_copy.pieces(tuple(
        (x.ctypes.data, start, x.size, x.itemsize)
        for start, x in zip(starts, arrays, strict=False)))


def halves(size):
    """Numbers that every dtype represents exactly; neighbors differ."""
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
    starts = itertools.accumulate(x.size for x in arrays)
    for x, y in zip(arrays, np.split(buffer, list(starts)), strict=False):
        check_scaled(x, y.reshape(x.shape))


def check_scaled(result, x):
    """Multiplied in the wider dtype of both, which is at least float32, and rounded once."""
    wide = np.result_type(result.dtype, x.dtype, 'f4').type
    expected = x.astype(wide) * wide(1 / 3)
    if result.itemsize == 2:  # the host has no direct way from double to float16
        expected = expected.astype('f4')
    np.testing.assert_array_equal(result, expected.astype(result.dtype))


def test_pack_scaled(kernels):
    arrays = arrays_of_all_kinds(halves)
    buffer = np.full(sum(x.size for x in arrays), np.nan, kernels.dtype)
    kernels('pack', pieces_of(arrays), buffer, 1 / 3)
    starts = itertools.accumulate(x.size for x in arrays)
    for x, y in zip(arrays, np.split(buffer, list(starts)), strict=False):
        check_scaled(y.reshape(x.shape), x)


@pytest.mark.parametrize('size', [1, 7, 8, 9, 2000, LENGTH - 3])
def test_nothing_else_is_written(kernels, size):
    x, buffer = np.ones(size, 'f4'), np.full(size + 64, 7, kernels.dtype)
    pieces = batched_copy.pieces(((x.ctypes.data, 32, size, 4),))
    kernels('pack', pieces, buffer)
    assert (buffer[32:32 + size] == 1).all()
    assert (np.delete(buffer, slice(32, 32 + size)) == 7).all()
    y = np.full(size + 64, 7, 'f4')
    pieces['array'] = y.ctypes.data + 32 * 4
    kernels('unpack', pieces, buffer)
    assert (y[32:32 + size] == 1).all()
    assert (np.delete(y, slice(32, 32 + size)) == 7).all()


def test_rounding(kernels):
    x = np.random.RandomState(0).standard_normal(1000).astype('f4')
    x[:4] = np.inf, -np.inf, np.nan, 1e30
    buffer = np.empty(1000, kernels.dtype)
    kernels('pack', pieces_of([x]), buffer)
    with np.errstate(over='ignore'):
        np.testing.assert_array_equal(buffer, x.astype(kernels.dtype))


def test_pieces_cover_everything_once():
    table = batched_copy.pieces(((1 << 40, 5, 2 * LENGTH + 3, 4), (7, 0, 0, 8), (64, 0, 5, 2)))
    assert table.dtype == batched_copy.PIECE
    assert table.tolist() == [
        (1 << 40, 5, LENGTH, 4),
        ((1 << 40) + 4 * LENGTH, 5 + LENGTH, LENGTH, 4),
        ((1 << 40) + 8 * LENGTH, 5 + 2 * LENGTH, 3, 4),
        (64, 0, 5, 2)]


def test_more_elements_than_an_int_holds():
    size = 2**31 + 1
    table = batched_copy.pieces(((16, 0, size, 4), (1 << 46, size, 2, 8)))
    assert table['size'].sum() == size + 2
    assert (table['start'] == np.cumsum(table['size'], dtype=np.int64) - table['size']).all()
    assert table[-1].tolist() == (1 << 46, size, 2, 8)
    assert table[-2].tolist() == (16 + 4 * 2**31, 2**31, 1, 4)


def test_no_arrays():
    assert len(batched_copy.pieces(())) == 0


def test_tables_are_cached_within_the_limit(gpu):
    tables = batched_copy.Tables(2000)
    a, b, c, d = (((16 * n, 0, 10, 4),) for n in range(4))
    for n, key in enumerate([a, b, c]):
        assert tables.get(0, 1, key)[0] == 1
        assert tables.n_made == n + 1
    table = tables.get(0, 1, a)[1]
    assert table.get().view(batched_copy.PIECE).tolist() == [(0, 0, 10, 4)]
    tables.get(0, 1, d)  # now b was used longest ago
    assert tables.n_made == 4
    for key in (a, c, d):
        tables.get(0, 1, key)
    assert tables.n_made == 4
    tables.get(0, 1, b)
    assert tables.n_made == 5
    tables.get(0, 2, b)  # on another stream
    assert tables.n_made == 6


def test_table_larger_than_the_limit(gpu):
    tables = batched_copy.Tables(2000)
    large = ((0, 0, 1000 * LENGTH, 4),)
    for _ in range(2):
        assert tables.get(0, 1, large)[0] == 1000
    assert tables.n_made == 1


def test_no_table(gpu):
    assert batched_copy.Tables(2000).get(0, 1, ())[0] == 0


@pytest.fixture
def compile_for_sm_90(monkeypatch):
    """Compiles as CuPy would for an H100; ``compile_for_sm_90(itemsize, kind)``."""
    pytest.importorskip('cupy', reason='needs CuPy, whose NVRTC compiles')
    from cupy._core import core
    from cupy.cuda import compiler

    for folder in sys.path:  # NVIDIA's wheel, where CuPy would not look for it
        for library in sorted(pathlib.Path(folder, 'nvidia').glob('*/lib/libnvrtc.so.*')):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    try:
        options = core.assemble_cupy_compiler_options(())  # as RawModule does
    except RuntimeError as error:
        pytest.skip(f'CuPy has no NVRTC: {error}')
    if hasattr(compiler, '_get_extra_include_dir_opts'):  # CuPy 13
        options += compiler._get_extra_include_dir_opts()

    def compile_for_sm_90(itemsize, kind):
        prefix = {'cubin': 'sm', 'ptx': 'compute'}[kind]
        # Otherwise CuPy would query the device.
        monkeypatch.setattr(compiler, '_get_arch_for_options_for_nvrtc',
                            lambda arch: (f'-arch={prefix}_{arch}', kind))
        return compiler.compile_using_nvrtc(
            batched_copy.source(itemsize), options, arch='90')[0]

    return compile_for_sm_90


@pytest.mark.parametrize('itemsize', [2, 4, 8])
def test_compiles_for_sm_90(itemsize, compile_for_sm_90):
    cubin = compile_for_sm_90(itemsize, 'cubin')
    assert cubin.startswith(b'\x7fELF')
    assert b'unpack' in cubin


@pytest.mark.parametrize('itemsize', [2, 4, 8])
def test_16_bytes_at_a_time(itemsize, compile_for_sm_90):
    ptx = compile_for_sm_90(itemsize, 'ptx')
    pack, unpack = re.split(r'\.entry unpack', ptx.decode() if isinstance(ptx, bytes) else ptx)
    vector = {2: r'v4\.[ub]32', 4: r'v4\.[fub]32', 8: r'v2\.[fub]64'}[itemsize]
    assert re.search(rf'st\.global\.{vector}', pack)  # to the buffer
    assert re.search(rf'ld\.global(\.nc)?\.{vector}', unpack)  # from there
    for size in (2, 4, 8):  # of an element of an array
        vector = {2: r'v4\.[ub]32', 4: r'v4\.[fub]32', 8: r'v2\.[fub]64'}[size]
        assert re.search(rf'ld\.{vector}', pack) and re.search(rf'st\.{vector}', unpack)
