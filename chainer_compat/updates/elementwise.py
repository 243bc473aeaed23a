"""Elementwise CuPy kernels, launched once for the arrays of many parameters.

Chainer's update rules and hooks launch a kernel for each parameter. They create the kernel with
:func:`elementwise`, so that the call for one parameter can be recorded. Then :func:`launch` builds
a kernel from the same source, which finds the arrays of all parameters in a table. Each block of
threads works on a piece of one array.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    Array = Any  # of CuPy

#: The number of elements of a piece, and of threads that work on it.
LENGTH, THREADS = 4096, 256

PIECE = np.dtype([('start', np.int64), ('array', np.int32), ('size', np.int32)])

#: CuPy's C types for dtypes.
C_TYPES = {'float16': 'float16', 'float32': 'float', 'float64': 'double'}

_SOURCE = '''
#include <cupy/carray.cuh>
#include <cupy/float16.cuh>
struct Piece {{ long long start; int array; int size; }};
{types}
extern "C" __global__ void {name}(
    const Piece* pieces_, void* const* pointers_, int n_{scalars}) {{
  const Piece piece_ = pieces_[blockIdx.x];
  {before}
  #pragma unroll 4
  for (int i_ = threadIdx.x; i_ < piece_.size; i_ += blockDim.x) {{
    {elements}
    {operation};
  }}
}}
'''

_recording = threading.local()


class Argument(NamedTuple):
    """An argument of a kernel."""

    dtype: str  # or a type letter, as in 'T x'
    name: str
    is_raw: bool
    is_input: bool


class Kernel:
    """A kernel that is called like CuPy's kernels, or records the call."""

    def __init__(self, in_params: str, out_params: str, operation: str, name: str) -> None:
        self._arguments = in_params, out_params, operation, name
        self.operation = operation
        self.name = name
        self.parameters = [*_parameters(in_params, True), *_parameters(out_params, False)]

    def __call__(self, *args: Any) -> Any:
        """Launch the kernel or record the call; return the last argument, the only output."""
        calls = getattr(_recording, 'calls', None)
        if calls is None:
            return self._of_cupy(*args)
        calls.append((self, args))
        return args[-1]

    @functools.cached_property
    def _of_cupy(self) -> Any:
        from chainer.backends import cuda

        cuda.check_cuda_available()
        return cuda.cupy.ElementwiseKernel(*self._arguments)


Call = tuple[Kernel, tuple[Any, ...]]
Place = tuple[int, int, int]


@functools.cache
def elementwise(in_params: str, out_params: str, operation: str, name: str) -> Kernel:
    """Return a kernel; the arguments are the same as for ``chainer.backends.cuda.elementwise``."""
    return Kernel(in_params, out_params, operation, name)


@contextlib.contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record the calls of kernels in this thread instead of launching them."""
    before = getattr(_recording, 'calls', None)
    calls: list[Call] = []
    _recording.calls = calls
    try:
        yield calls
    finally:
        _recording.calls = before


def launch(call: Call, first_arrays: Sequence[Array], arrays: Sequence[Sequence[Array]],
           divided: int | None = None, divisor: float = 1.) -> bool:
    """Repeat a call for the first parameter with the arrays of all parameters.

    Args:
        call: The recorded call.
        first_arrays: Arrays of the first parameter, which may be arguments of the call.
        arrays: For each of these arrays, the arrays of all parameters. They must be C-contiguous
            and on the current device. Arrays of the same parameter have the same size, and arrays
            in the same row have the same dtype.
        divided: The index of the row whose arrays are divided first.
        divisor: The divisor.

    Returns:
        Whether the kernel was launched, which requires that all other arguments are numbers.
    """
    if len({id(array) for array in first_arrays}) < len(first_arrays):
        return False  # the gradient is the parameter's array, maybe only for the first parameter
    kernel, args = call
    places: list[int | None] = []  # rows of arrays; None for other arguments
    dtypes: dict[str, str] = {}
    for parameter, arg in zip(kernel.parameters, args, strict=True):
        place = next((i for i, array in enumerate(first_arrays) if arg is array), None)
        places.append(None if parameter.is_raw else place)
        if hasattr(arg, 'dtype') and hasattr(arg, 'data') and not isinstance(arg, np.generic):
            if dtypes.setdefault(parameter.dtype, arg.dtype.name) != arg.dtype.name or (
                    place is None and not parameter.is_raw):
                return False
        elif not isinstance(arg, int | float | np.number):
            return False
    if any(dtypes.get(parameter.dtype) not in C_TYPES for parameter in kernel.parameters):
        return False
    used = [i for i in dict.fromkeys(places) if i is not None]
    if not used:
        return False
    if divided is not None and places.count(divided) != 1:
        return False
    function = _function(kernel, tuple(sorted(dtypes.items())), tuple(
        None if i is None else used.index(i) for i in places),
        None if divided is None else places.index(divided))
    scalars = [_scalar(arg, dtypes[parameter.dtype]) for parameter, arg, place in zip(
        kernel.parameters, args, places, strict=True) if place is None and not parameter.is_raw]
    if divided is not None:
        dtype = dtypes[kernel.parameters[places.index(divided)].dtype]
        scalars.append(_scalar(divisor, dtype))
        if scalars[-1] != divisor:  # not representable
            return False
    pieces, pointers = tables([arrays[i] for i in used])
    if len(pieces):
        function((len(pieces),), (THREADS,), (
            pieces, pointers, np.int32(len(arrays[0])), *scalars))
    return True


def _parameters(text: str, is_input: bool) -> Iterator[Argument]:
    for each in text.split(','):
        *raw, dtype, name = each.split()
        yield Argument(dtype, name, raw == ['raw'], is_input)


def _scalar(value: Any, dtype: str) -> np.generic:
    """Return a number, rounded to a dtype, as a kernel argument; float16 is passed as float32."""
    rounded = np.dtype(dtype).type(value)
    return np.float32(rounded) if dtype == 'float16' else rounded


@functools.lru_cache(maxsize=256)
def _function(kernel: Kernel, dtypes: tuple[tuple[str, str], ...], places: tuple[int | None, ...],
              divided: int | None) -> Any:
    from chainer.backends.cuda import cupy

    code = source(kernel, dict(dtypes), places, divided)
    return cupy.RawModule(code=code).get_function(_name(kernel))


def source(kernel: Kernel, dtypes: dict[str, str], places: Sequence[int | None],
           divided: int | None = None) -> str:
    """Return the CUDA source of a kernel.

    Args:
        kernel: The kernel, with the operation for one element.
        dtypes: The dtypes of the type letters.
        places: For each parameter, its row in the table of addresses; ``None`` for a number.
        divided: The index of the parameter that is divided first. The divisor is one more argument.
    """
    types = ''.join(f'typedef {C_TYPES[dtypes[letter]]} {letter};\n' for letter in dtypes)
    scalars, before, elements = '', [], []
    for i, (dtype, name, is_raw, is_input) in enumerate(kernel.parameters):
        place = places[i]
        if is_raw:  # only determines a dtype
            continue
        if place is None:
            scalars += f', {_c_type_of_number(dtypes[dtype])} {name}_'
            before.append(f'const {dtype} {name} = ({dtype}){name}_;')
            continue
        before.append(f'{dtype}* __restrict__ {name}_ = '
                      f'({dtype}*)pointers_[{place} * n_ + piece_.array] + piece_.start;')
        if i == divided:
            elements.append(f'const {dtype} {name} = {name}_[i_] /= ({dtype})divisor_;')
        else:
            elements.append(f'{"const " * is_input}{dtype}{"&" * (not is_input)} {name} = '
                            f'{name}_[i_];')
    if divided is not None:
        scalars += f', {_c_type_of_number(dtypes[kernel.parameters[divided].dtype])} divisor_'
    return _SOURCE.format(
        types=types, name=_name(kernel), scalars=scalars, before='\n  '.join(before),
        elements='\n    '.join(elements), operation=kernel.operation)


def _c_type_of_number(dtype: str) -> str:
    return 'double' if dtype == 'float64' else 'float'


def _name(kernel: Kernel) -> str:
    return f'{re.sub(r"[^a-z0-9_]", "_", kernel.name)}_of_many'


def tables(arrays: Sequence[Sequence[Array]]) -> tuple[Array, Array]:
    """Return the pieces and the addresses of the arrays, on the current device."""
    addresses = np.array([[x.data.ptr for x in row] for row in arrays], np.int64)
    place = current_place()
    return (_uploaded_pieces(place, tuple(x.size for x in arrays[0])),
            _uploaded(place, addresses.tobytes()))


def current_place() -> Place:
    """Return a key that is the same for launches that run in order: device, stream, thread.

    The handle of the per-thread default stream is the same in all threads.
    """
    from chainer.backends.cuda import cupy

    return (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr,
            threading.get_ident())


def memory_of(array: Array) -> int:
    """Return a key that is the same for arrays that may overlap.

    It is an address, because memory of other libraries has a separate object for each array.
    """
    memory = array.data.mem
    return memory.ptr or id(memory)  # 0: no elements


# When a table is dropped, its memory can only be reused on the same stream, so after the launch.

@functools.lru_cache(maxsize=64)
def _uploaded_pieces(place: Place, sizes: tuple[int, ...]) -> Array:
    from chainer.backends.cuda import cupy

    return cupy.asarray(pieces(sizes).view(np.int64).reshape(-1, 2))


@functools.lru_cache(maxsize=64)
def _uploaded(place: Place, table: bytes) -> Array:
    from chainer.backends.cuda import cupy

    return cupy.asarray(np.frombuffer(table, np.int64))


def pieces(sizes: Sequence[int]) -> np.ndarray:
    """Split arrays into pieces of at most ``LENGTH`` elements."""
    counts = -(-np.array(sizes, np.int64) // LENGTH)
    which = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    table = np.empty(len(which), PIECE)
    table['array'] = which
    table['start'] = (np.arange(len(which)) - first[which]) * LENGTH
    table['size'] = np.minimum(np.array(sizes)[which] - table['start'], LENGTH)
    return table
