"""Compiles the source of CuPy's kernels for an H100, on a machine without a GPU."""

import ctypes
import pathlib
import sys

import pytest


def load():
    """Load NVRTC from NVIDIA's wheel, where CuPy does not search for it."""
    for folder in sys.path:
        for library in sorted(pathlib.Path(folder, 'nvidia').glob('*/lib/libnvrtc.so.*')):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def compiler():
    """Return a function that compiles source as CuPy would. Skip the test without NVRTC."""
    pytest.importorskip('cupy', reason='needs CuPy with NVRTC')
    from cupy._core import core
    from cupy.cuda import compiler

    load()
    try:
        options = core.assemble_cupy_compiler_options(())
    except RuntimeError as error:
        pytest.skip(f'CuPy has no NVRTC: {error}')
    if hasattr(compiler, '_get_extra_include_dir_opts'):  # CuPy 13
        options += compiler._get_extra_include_dir_opts()
    headers = ''.join(f'#include <{header}>\n' for header in core._cupy_header_list)

    def compile_for_h100(source, kind='cubin', options=options):
        prefix = {'cubin': 'sm', 'ptx': 'compute'}[kind]
        with pytest.MonkeyPatch.context() as monkeypatch:
            # Otherwise, CuPy would query the device.
            monkeypatch.setattr(compiler, '_get_arch_for_options_for_nvrtc',
                                lambda arch: (f'-arch={prefix}_{arch}', kind))
            compiled, _ = compiler.compile_using_nvrtc(headers + source, options, arch='90')
        compiled = compiled.encode() if isinstance(compiled, str) else compiled
        assert compiled.startswith(b'\x7fELF') == (kind == 'cubin')
        return compiled

    return compile_for_h100
